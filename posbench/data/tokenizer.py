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
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from posbench import files
from posbench.data.paths import expanded
from posbench.errors import PosbenchError, UserError, did_you_mean

logger = logging.getLogger(__name__)

SEPARATOR = "<|endoftext|>"
PIECE = 2**16  # characters encoded at a time: bounds memory, and lets one long document use all threads
_ON_THE_HUB = re.compile(r"\w[\w.-]*(?:/\w[\w.-]*)?(?:@[\w./-]+)?")
# A single space between two other characters: byte-level pre-tokenizers always part words there.
BORDER = re.compile(r"(?<=\S) (?=\S)")
_PROBE = "Of the 3 it is (a \"test\") at: 45 x = y - z, été 你 好 don't A B c d . , I'm in a the end"  # full of borders
# Letters, digits, signs or spaces without anything else between them, which a byte-level pre-tokenizer takes for one
# word. BPE's time grows with the square of a word's length: a word is cut where it has this many characters.
LONGEST_WORD = 4096
_ENDLESS = re.compile("|".join(f"{kind}{{{LONGEST_WORD}}}" for kind in (r"[^\W\d_]", r"\d", r"(?:[^\w\s]|_)", r"\s")))
# A match of half that length. Each match of `_ENDLESS` contains one that begins at a multiple of half the length.
_HALF = re.compile(_ENDLESS.pattern.replace(str(LONGEST_WORD), str(LONGEST_WORD // 2)))


class Tokenizer:
    """A `tokenizers.Tokenizer` that never finds special tokens in text and knows the bytes behind each id.

    Attributes:
        vocab_size: number of ids, the separator included.
        separator: id of the token that begins a document; of a model from elsewhere, one of its own.
        sha256: of the tokenizer's JSON, which is all there is to it.
    """

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
        self.separator: int = inner.get_vocab()[SEPARATOR] if separator is None else separator
        self.vocab_size: int = max(inner.get_vocab().values()) + 1
        self.sha256 = hashlib.sha256(inner.to_str().encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token ids of each text, without separators; UserError if the tokenizer fails."""
        cut = [list(self.pieces(text)) for text in texts]
        try:
            encoded = iter(self._inner.encode_batch_fast([*itertools.chain(*cut)], add_special_tokens=False))
        except PosbenchError:  # a signal
            raise
        except Exception as error:
            raise UserError(f"the tokenizer cannot encode this text: {str(error).partition(chr(10))[0]}") from None
        return [np.concatenate([np.array(next(encoded).ids, np.uint32) for _ in parts]) for parts in cut]

    def pieces(self, text: str) -> Iterable[str]:
        """Cut a text into pieces whose ids are its ids: at least one."""
        if len(text) < LONGEST_WORD or self._lead is None:
            return [text]
        if self._lead == "":
            return pieces(text)
        return (piece.removeprefix(self._lead) if number else piece for number, piece in enumerate(_at_borders(text)))

    @functools.cached_property
    def _lead(self) -> str | None:
        """What later pieces must lose: nothing, or the space that a tokenizer prepends itself; None: do not cut."""

        def ids(text: str) -> list[int]:
            return list(self._inner.encode(text, add_special_tokens=False).ids)

        ends = [border.start() for border in BORDER.finditer(_PROBE)]
        for lead in ("", " "):
            with contextlib.suppress(Exception):  # of a tokenizer that knows its own words alone
                if all(ids(_PROBE[:end]) + ids(_PROBE[end:].removeprefix(lead)) == ids(_PROBE) for end in ends):
                    return lead
        return None

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
        description = self.description
        if not _is_byte_exact(description):
            return None
        counts = np.zeros(self.vocab_size, dtype=np.int64)
        for token, i in self._inner.get_vocab(with_added_tokens=False).items():
            counts[i] = len(token)  # one character of the byte-level alphabet stands for one byte
        for added in description["added_tokens"]:
            counts[added["id"]] = len(added["content"].encode())
        counts[self.separator] = 0
        return counts


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train byte-level BPE. Deterministic; on little text the vocabulary comes out smaller than asked."""
    if vocab_size < 257:
        raise UserError(f"data.vocab_size is {vocab_size}: expected at least 257 (256 bytes and the separator)")
    inner, alphabet = _byte_level(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[SEPARATOR], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
    return Tokenizer(inner)


def raw_bytes() -> Tokenizer:
    """Return the tokenizer whose ids 0 to 255 are the bytes themselves; the separator is 256."""
    return Tokenizer(_byte_level(models.BPE(vocab={c: i for i, c in enumerate(_byte_alphabet())}, merges=[])))


def of_symbols(symbols: Sequence[str]) -> Tokenizer:
    """Return the tokenizer of a task: each symbol is a word and has its place among them as id.

    Args:
        symbols: different words, the separator first. Other words are refused where text is encoded.
    """
    inner = tokenizers.Tokenizer(models.WordLevel(vocab={symbol: i for i, symbol in enumerate(symbols)}))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Tokenizer(inner)


def find(setting: str, separator: int | None = None) -> tuple[Tokenizer, str | None]:
    """Return the tokenizer of a `tokenizer.json`, its folder, or a model on the hub, and the hub's commit.

    Nothing but this one file is read, and nothing in it is run.
    """
    path = expanded(setting, "data.tokenizer")
    if path.exists() or not _ON_THE_HUB.fullmatch(setting) or setting.endswith(".json"):
        return from_file(path / "tokenizer.json" if path.is_dir() else path, separator), None
    from posbench.data import hub

    try:
        file, commit = hub.tokenizer_file(setting)
    except UserError as error:
        raise UserError(f"{error}{did_you_mean(setting, ('bpe', 'bytes'))}") from None
    return from_file(file, separator), commit


def from_file(path: Path, separator: int | None = None) -> Tokenizer:
    """Read a `tokenizer.json`.

    Args:
        separator: id of the token that begins a document; None: `<|endoftext|>`, which is added if it is not there.
    """
    if not path.is_file():
        near = did_you_mean(path.name, [file.name for file in path.parent.glob("*.json")])
        expected = "bpe, bytes, a tokenizer.json or its folder, or a model on the hub such as gpt2"
        raise UserError(f"data.tokenizer: there is no '{path}': expected {expected}{near}")
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        raise UserError(f"'{path}' is not a tokenizer.json: {str(error).partition(chr(10))[0]}") from None
    return Tokenizer(inner, separator)


def _byte_level(model: models.Model) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return inner


def _byte_alphabet() -> list[str]:
    """The character that byte-level BPE writes for each byte: itself if printable in Latin-1, else one from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def pieces(text: str) -> Iterator[str]:
    """Cut a text where a byte-level pre-tokenizer always parts words, and inside a word without end.

    At least one piece, of about `PIECE` characters. Joined they are the text.
    """
    ends = [len(text)]
    # Looking for words without end at each character takes a quarter of a second per million: only where one may be.
    if any(_HALF.match(text, at) for at in range(0, len(text), LONGEST_WORD // 2)):
        ends = [*(word.end() for word in _ENDLESS.finditer(text)), len(text)]
    for start, end in itertools.pairwise([0, *ends]):
        yield from _at_borders(text[start:end])


def _at_borders(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > PIECE and (border := BORDER.search(text, start + PIECE)):
        yield text[start : border.start()]
        start = border.start()
    yield text[start:]


def _is_byte_exact(description: dict[str, Any]) -> bool:
    """Whether every byte of any text ends in exactly one token, judged by the parts of a tokenizer's JSON."""
    steps, model = description["pre_tokenizer"] or {}, description["model"]
    steps = steps.get("pretokenizers", [steps])
    return (
        description["normalizer"] is None
        and model["type"] == "BPE"
        and set(_byte_alphabet()) <= set(model["vocab"])
        and not (model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"))
        and steps[-1].get("type") == "ByteLevel"
        and not any(step.get("add_prefix_space") or step.get("behavior") == "Removed" for step in steps)
        and all(step.get("type") in ("ByteLevel", "Split", "Digits") for step in steps)
        and not any(added["lstrip"] or added["rstrip"] for added in description["added_tokens"])
    )
