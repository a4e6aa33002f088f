"""Tokenizers: byte-level BPE trained here (Sennrich et al. (2016), arXiv:1508.07909, on
bytes as in GPT-2), raw bytes, or a `tokenizer.json`.

The separator `<|endoftext|>` begins every document; in a text these characters are
ordinary.
"""

import functools
import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from posbench import files
from posbench.data import hub
from posbench.errors import UserError
from posbench.tasks.base import SEPARATOR

MADE_HERE = ("bpe", "bytes")  # other tokenizers are read from files
# characters of a piece, and pieces encoded at once: bounds memory, and uses all threads
PIECE, AT_ONCE = 2**16, 16
# byte-level pre-tokenizers split before this space
BORDER = re.compile(r"(?<=\S) (?=\S)")
# what a tokenizer that keeps text as it is gives back
_CHARACTERS = (
    "".join(map(chr, range(0x250))) + " e\u0301 ﬁ ² 你 🙂   It's 12345 THE end "
)


class Tokenizer:
    """A `tokenizers.Tokenizer` that never finds special tokens in text and knows the
    bytes behind each id.
    """

    def __init__(
        self, inner: tokenizers.Tokenizer, separator: int | None = None
    ) -> None:
        inner.no_padding()
        inner.no_truncation()
        if isinstance(inner.model, models.BPE):
            inner.model.dropout = None  # else it draws its tokens at random
        if separator is None:
            inner.add_special_tokens([SEPARATOR])
            separator = inner.get_vocab()[SEPARATOR]
        inner.encode_special_tokens = True

        self._inner = inner
        self.separator: int = separator
        self.vocab_size: int = max(inner.get_vocab().values()) + 1
        # the dtype of ids on disk
        self.dtype = np.uint16 if self.vocab_size <= 2**16 else np.uint32
        self.sha256 = hashlib.sha256(inner.to_str().encode()).hexdigest()

    def encode(self, texts: Iterable[str]) -> list[np.ndarray]:
        """Return the token ids of each text, without separators."""
        encoded = []
        for text in texts:
            ids_of_pieces = [ids for _, _, ids in self.encode_pieces([text])]
            encoded.append(np.concatenate(ids_of_pieces))
        return encoded

    def encode_pieces(
        self, texts: Iterable[str]
    ) -> Iterator[tuple[bool, str, np.ndarray]]:
        """Yield each text in one or more pieces: whether a piece begins a text, the
        piece, its ids.
        """
        cut = self._cut(texts)
        while True:
            batch = list(itertools.islice(cut, AT_ONCE))
            if not batch:
                return
            try:
                encodings = self._inner.encode_batch_fast(
                    [piece for _, piece in batch], add_special_tokens=False
                )
            except Exception as error:  # the library's only class
                raise UserError(
                    f"data.tokenizer: {error}: expected a tokenizer that has a token"
                    " for what it does not know"
                ) from None
            for (begins, piece), encoding in zip(batch, encodings, strict=True):
                yield begins, piece, np.array(encoding.ids, np.uint32)

    def _cut(self, texts: Iterable[str]) -> Iterator[tuple[bool, str]]:
        """Yield the pieces of texts, and whether each begins a text."""
        for text in texts:
            if len(text) <= PIECE or self.token_bytes is None:
                yield True, text
                continue
            for number, piece in enumerate(pieces(text)):
                yield number == 0, piece

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; bytes that are no UTF-8 become U+FFFD."""
        return self._inner.decode([int(i) for i in ids], skip_special_tokens=False)

    def save(self, path: Path) -> None:
        """Write the `tokenizer.json`."""
        files.write(path, self._inner.to_str().encode())

    @property
    def description(self) -> dict[str, Any]:
        """The contents of its `tokenizer.json`."""
        return dict(json.loads(self._inner.to_str()))

    @functools.cached_property
    def texts(self) -> tuple[str, ...]:
        """The text of each id, for encodings that look at the vocabulary."""
        return tuple(self.decode([i]) for i in range(self.vocab_size))

    @functools.cached_property
    def token_bytes(self) -> np.ndarray | None:
        """UTF-8 bytes of each id's text, (vocab_size,) int64; None if tokens are not
        exact pieces of text.
        """
        sizes = np.zeros(self.vocab_size, np.int64)
        for token, i in self._inner.get_vocab(with_added_tokens=False).items():
            # a character of the byte-level alphabet stands for a byte
            sizes[i] = len(token)
        for added in self.description["added_tokens"]:
            sizes[added["id"]] = len(added["content"].encode())
            # it takes in the white space beside it, more or less of it
            takes_spaces = added["lstrip"] or added["rstrip"]
            if takes_spaces and not added["special"]:
                return None
        sizes[self.separator] = 0

        try:
            encoding = self._inner.encode(_CHARACTERS, add_special_tokens=False)
        except Exception:  # the library's only class: it may know its own words alone
            return None
        ids = encoding.ids
        if self.decode(ids) != _CHARACTERS:
            return None
        return sizes if sizes[ids].sum() == len(_CHARACTERS.encode()) else None


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train byte-level BPE. On little text the vocabulary is smaller than
    `vocab_size`.
    """
    inner = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[SEPARATOR], show_progress=False
    )
    trainer.initial_alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        itertools.chain.from_iterable(map(pieces, texts)), trainer
    )
    return Tokenizer(inner)


def raw_bytes() -> Tokenizer:
    """Return the tokenizer whose ids 0 to 255 are the bytes themselves; the separator
    is 256.
    """
    # Printable bytes stand for themselves, and those beyond 255 for the others in turn.
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [ord(character) for character in characters if ord(character) < 256]
    others = sorted({*range(256)} - {*printable})
    vocab = dict(zip(characters, printable + others, strict=True))
    return Tokenizer(_byte_level(models.BPE(vocab=vocab, merges=[])))


def of_symbols(symbols: Sequence[str]) -> Tokenizer:
    """Return the tokenizer of a task: each symbol is a word, and its place its id."""
    vocab = {symbol: i for i, symbol in enumerate(symbols)}
    inner = tokenizers.Tokenizer(models.WordLevel(vocab=vocab))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Tokenizer(inner)


def find(setting: str, separator: int | None = None) -> tuple[Tokenizer, str | None]:
    """Return the tokenizer of a `tokenizer.json`, of its folder, or of a model on the
    hub; and the hub's commit.
    """
    path = file_of(setting)
    revision = None
    if not path.exists() and path.suffix != ".json":
        try:
            folder, revision = hub.model_folder(setting, ["tokenizer.json"])
        except UserError as error:
            raise UserError(
                f"data.tokenizer: {error} (expected bpe, bytes, a tokenizer.json, a"
                " folder with one, or a model on the hub)"
            ) from None
        path = folder / "tokenizer.json"
    return from_file(path, separator), revision


def file_of(setting: str) -> Path:
    """Return the file of a tokenizer on this machine: where it is, or would be."""
    path = Path(setting)
    return path / "tokenizer.json" if path.is_dir() else path


def from_file(path: Path, separator: int | None = None) -> Tokenizer:
    """Read a `tokenizer.json`. `separator` is an id; by default `<|endoftext|>`
    separates, and is added if missing.
    """
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library has no other class
        reason = str(error).partition("\n")[0]
        raise UserError(f"data.tokenizer: '{path}' cannot be read: {reason}") from None
    return Tokenizer(inner, separator)


def lost(made: Tokenizer, texts: Iterable[str]) -> tuple[float, str]:
    """Return the share of the characters of texts that do not come back from their
    tokens, and the most frequent ones. White space does not count: tokenizers of words
    leave it out.
    """
    n_characters = 0
    missing: Counter[str] = Counter()
    for text in texts:
        (ids,) = made.encode([text])
        written = Counter("".join(text.split()))
        n_characters += written.total()
        missing += written - Counter(made.decode(ids))
    examples = "".join(character for character, _ in missing.most_common(5))
    return missing.total() / max(1, n_characters), examples


def _byte_level(model: models.Model) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return inner


def pieces(text: str) -> Iterator[str]:
    """Cut a text where byte-level pre-tokenizers always split it. A word without end is
    cut anywhere.
    """
    start = 0
    while len(text) - start > PIECE:
        border = BORDER.search(text, start + PIECE, start + 2 * PIECE)
        end = border.start() if border else start + PIECE // 16
        yield text[start:end]
        start = end
    yield text[start:]
