"""Text to token ids and back: byte-level BPE trained here, raw bytes, or a `tokenizer.json`, of the hub as well.

One separator, `<|endoftext|>`, begins every document. The same characters inside a document are ordinary text: data
must not be able to end a document. Byte-level BPE: Sennrich et al. (2016), arXiv:1508.07909, on bytes as in GPT-2.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from posbench import files
from posbench.errors import UserError

logger = logging.getLogger(__name__)

SEPARATOR = "<|endoftext|>"
PIECE, AT_ONCE = 2**16, 64  # characters of a piece, and pieces encoded at once: bounds memory, and uses all threads
BORDER = re.compile(r"(?<=\S) (?=\S)")  # byte-level pre-tokenizers part words there
_PROBE = "Of the 3 it is (a \"test\") at: 45 x = y - z, été 你 好 don't A B c d . , I'm in a the end"  # full of borders
# Letters, digits, signs or spaces without anything else between them, which a byte-level pre-tokenizer takes for one
# word. BPE learns in a time that grows with the square of a word's length: it is cut where it has this many characters.
LONGEST_WORD = 4096
_ENDLESS = re.compile("|".join(f"{kind}{{{LONGEST_WORD}}}" for kind in (r"[^\W\d_]", r"\d", r"(?:[^\w\s]|_)", r"\s")))


class Tokenizer:
    """A `tokenizers.Tokenizer` that never finds special tokens in text and knows the bytes behind each id."""

    def __init__(self, inner: tokenizers.Tokenizer, separator: int | None = None) -> None:
        inner.no_padding()
        inner.no_truncation()
        if getattr(inner.model, "dropout", None):
            logger.warning("the tokenizer draws its tokens at random (BPE dropout): this is switched off")
            inner.model.dropout = None
        if separator is None:
            inner.add_special_tokens([SEPARATOR])
        inner.encode_special_tokens = True
        self._inner = inner
        # The id of the token that begins a document; of a model from elsewhere, one of its own.
        self.separator: int = inner.get_vocab()[SEPARATOR] if separator is None else separator
        self.vocab_size: int = max(inner.get_vocab().values()) + 1
        self.sha256 = hashlib.sha256(inner.to_str().encode()).hexdigest()

    def encode(self, texts: Iterable[str]) -> list[np.ndarray]:
        """Return the token ids of each text, without separators."""
        parts: list[list[np.ndarray]] = []
        for begins, _, ids in self.encode_pieces(texts):
            if begins:
                parts.append([])
            parts[-1].append(ids)
        return [np.concatenate(of_text) for of_text in parts]

    def encode_pieces(self, texts: Iterable[str]) -> Iterator[tuple[bool, int, np.ndarray]]:
        """Yield pieces of texts, at least one of each: whether it begins a text, its number of characters, its ids."""
        cut = (pieces(t) if len(t) >= LONGEST_WORD and self._parts_at_borders else [t] for t in texts)
        every = ((number == 0, piece) for of_text in cut for number, piece in enumerate(of_text))
        while batch := list(itertools.islice(every, AT_ONCE)):
            encoded = self._inner.encode_batch_fast([piece for _, piece in batch], add_special_tokens=False)
            for (begins, piece), each in zip(batch, encoded, strict=True):
                yield begins, len(piece), np.array(each.ids, np.uint32)

    @functools.cached_property
    def _parts_at_borders(self) -> bool:
        ends = [0, *(border.start() for border in BORDER.finditer(_PROBE)), None]
        with contextlib.suppress(Exception):  # of a tokenizer that knows its own words alone
            parts = self.encode(_PROBE[start:end] for start, end in itertools.pairwise(ends))
            return np.array_equal(np.concatenate(parts), self.encode([_PROBE])[0])
        return False

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; bytes that are no UTF-8 become U+FFFD."""
        return self._inner.decode([int(i) for i in ids], skip_special_tokens=False)

    def save(self, path: Path) -> None:
        """Write the `tokenizer.json`."""
        files.write(path, self._inner.to_str().encode())

    @property
    def description(self) -> dict[str, Any]:
        """The parts of it, as a `tokenizer.json` has them."""
        return dict(json.loads(self._inner.to_str()))

    @functools.cached_property
    def texts(self) -> tuple[str, ...]:
        """The text of each id, for encodings that look at the vocabulary."""
        return tuple(self.decode([i]) for i in range(self.vocab_size))

    @functools.cached_property
    def token_bytes(self) -> np.ndarray | None:
        """UTF-8 bytes of the text behind each id, the separator having none: (vocab_size,) int64.

        None where the tokenizer normalises, drops or adds text, so that bits per byte are undefined.
        """
        parts = self.description
        steps, model, added = parts["pre_tokenizer"] or {}, parts["model"], parts["added_tokens"]
        steps = steps.get("pretokenizers", [steps])
        is_exact = (  # every byte of any text ends in exactly one token
            parts["normalizer"] is None
            and model["type"] == "BPE"
            and {*pre_tokenizers.ByteLevel.alphabet()} <= {*model["vocab"]}
            and not (model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"))
            and steps[-1].get("type") == "ByteLevel"
            and all(step.get("type") in ("ByteLevel", "Split", "Digits") for step in steps)
            and not any(step.get("add_prefix_space") or step.get("behavior") == "Removed" for step in steps)
            and not any(token["lstrip"] or token["rstrip"] for token in added)
        )
        # One character of the byte-level alphabet stands for one byte.
        sizes = {i: len(token) for token, i in self._inner.get_vocab(with_added_tokens=False).items()}
        sizes |= {token["id"]: len(token["content"].encode()) for token in added} | {self.separator: 0}
        return np.array([sizes.get(i, 0) for i in range(self.vocab_size)]) if is_exact else None


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train byte-level BPE. On little text the vocabulary comes out smaller than asked."""
    inner = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[SEPARATOR], show_progress=False)
    trainer.initial_alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
    return Tokenizer(inner)


def raw_bytes() -> Tokenizer:
    """Return the tokenizer whose ids 0 to 255 are the bytes themselves; the separator is 256."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}  # in Latin-1: they stand for themselves
    others = iter(range(256, 512))
    vocab = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    return Tokenizer(_byte_level(models.BPE(vocab=vocab, merges=[])))


def of_symbols(symbols: Sequence[str]) -> Tokenizer:
    """Return the tokenizer of a task: each symbol, the separator first, is a word and has its place as id."""
    inner = tokenizers.Tokenizer(models.WordLevel(vocab={symbol: i for i, symbol in enumerate(symbols)}))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Tokenizer(inner)


def find(setting: str, separator: int | None = None) -> tuple[Tokenizer, str | None]:
    """Return the tokenizer of a `tokenizer.json`, its folder, or a model on the hub, and the hub's commit."""
    path, commit = Path(os.path.expanduser(setting)), None
    if not path.exists() and path.suffix != ".json":
        from posbench.data import hub

        path, commit = hub.model_folder(setting, ["tokenizer.json"])
    return from_file(path / "tokenizer.json" if path.is_dir() else path, separator), commit


def from_file(path: Path, separator: int | None = None) -> Tokenizer:
    """Read a `tokenizer.json`; its separator is the token of that id, or `<|endoftext|>`, added if it is not there."""
    try:
        return Tokenizer(tokenizers.Tokenizer.from_file(str(path)), separator)
    except Exception as error:
        raise UserError(f"data.tokenizer: '{path}' cannot be read: {str(error).partition(chr(10))[0]}") from None


def _byte_level(model: models.Model) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return inner


def pieces(text: str) -> Iterator[str]:
    """Cut a text where byte-level pre-tokenizers always part words, and inside a word without end."""
    start, ends, half = 0, [len(text)], LONGEST_WORD // 2
    # A word without end has a block of half its length without a space, or of spaces. Looking for it takes longer.
    if any(len(text[at : at + half].split()) < 2 for at in range(0, len(text), half)):
        ends = [*(word.end() for word in _ENDLESS.finditer(text)), len(text)]
    for end in ends:
        while end - start > PIECE and (border := BORDER.search(text, start + PIECE, end)):
            yield text[start : border.start()]
            start = border.start()
        yield text[start:end]
        start = end
