"""The data of a run: the problems of a task, or the tokens of a text. These are kept in
a cache and memory-mapped.

A tokenizer is byte-level BPE trained here (Sennrich et al. (2016), arXiv:1508.07909, on
bytes as in GPT-2), raw bytes, or a `tokenizer.json`. The separator `<|endoftext|>`
begins every document; in a text these characters are ordinary.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import itertools
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from filelock import FileLock
from tokenizers import decoders, models, pre_tokenizers, trainers

from posbench import files, tasks
from posbench.config.schema import Config, DataConfig, TrainingConfig
from posbench.data import batches, hub, text
from posbench.data.batches import Batch, ProblemBatches, TrainingBatches
from posbench.errors import UserError
from posbench.tasks.base import SEPARATOR, Task
from posbench.terminal import console

logger = logging.getLogger(__name__)

# the version of the cache, raised when the same settings would give other files
FORMAT = 6
# BPE learns from at most this much training text, from documents drawn evenly
BPE_CHARACTERS = 16 * 2**20
VALIDATION_SIZE = 256  # blocks of validation text, or problems, of each validation loss
# characters of a piece, and pieces encoded at once: bounds memory, and uses all threads
PIECE, AT_ONCE = 2**16, 16
# byte-level pre-tokenizers split before this space
BORDER = re.compile(r"(?<=\S) (?=\S)")
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
        if getattr(inner.model, "dropout", None):
            logger.warning(
                "the tokenizer draws its tokens at random (BPE dropout): this is"
                " switched off"
            )
            inner.model.dropout = None
        if separator is None:
            inner.add_special_tokens([SEPARATOR])
        inner.encode_special_tokens = True
        self._inner = inner
        self.separator: int = (
            inner.get_vocab()[SEPARATOR] if separator is None else separator
        )
        self.vocab_size: int = max(inner.get_vocab().values()) + 1
        # the dtype of ids on disk
        self.dtype = np.uint16 if self.vocab_size <= 2**16 else np.uint32
        self.sha256 = hashlib.sha256(inner.to_str().encode()).hexdigest()

    def encode(self, texts: Iterable[str]) -> list[np.ndarray]:
        """Return the token ids of each text, without separators."""
        return [
            np.concatenate([ids for _, _, ids in self.encode_pieces([text])])
            for text in texts
        ]

    def encode_pieces(
        self, texts: Iterable[str]
    ) -> Iterator[tuple[bool, int, np.ndarray]]:
        """Yield each text in one or more pieces: whether a piece begins a text, its
        number of characters, its ids.
        """
        by_text = (
            (
                pieces(text)
                if len(text) > PIECE and self.token_bytes is not None
                else [text]
            )
            for text in texts
        )
        numbered = (
            (number == 0, piece)
            for of_text in by_text
            for number, piece in enumerate(of_text)
        )
        while batch := list(itertools.islice(numbered, AT_ONCE)):
            encoded = self._inner.encode_batch_fast(
                [piece for _, piece in batch], add_special_tokens=False
            )
            for (begins, piece), encoding in zip(batch, encoded, strict=True):
                yield begins, len(piece), np.array(encoding.ids, np.uint32)

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
        sizes[self.separator] = 0
        with contextlib.suppress(Exception):  # a tokenizer may know its own words alone
            (ids,) = self.encode([_CHARACTERS])
            if self.decode(ids) == _CHARACTERS and sizes[ids].sum() == len(
                _CHARACTERS.encode()
            ):
                return sizes
        return None


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train byte-level BPE. On little text the vocabulary is smaller than `vocab_size`."""
    inner = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[SEPARATOR], show_progress=False
    )
    trainer.initial_alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        (piece for text in texts for piece in pieces(text)), trainer
    )
    return Tokenizer(inner)


def raw_bytes() -> Tokenizer:
    """Return the tokenizer whose ids 0 to 255 are the bytes themselves; the separator
    is 256.
    """
    # in Latin-1: they stand for themselves
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(256, 512))
    vocab = {
        chr(byte if byte in printable else next(substitutes)): byte
        for byte in range(256)
    }
    return Tokenizer(_byte_level(models.BPE(vocab=vocab, merges=[])))


def find(setting: str, separator: int | None = None) -> tuple[Tokenizer, str | None]:
    """Return the tokenizer of a `tokenizer.json`, of its folder, or of a model on the
    hub; and the hub's commit.
    """
    path, revision = Path(os.path.expanduser(setting)), None
    if not path.exists() and path.suffix != ".json":
        path, revision = hub.model_folder(setting, ["tokenizer.json"])
    return (
        from_file(path / "tokenizer.json" if path.is_dir() else path, separator),
        revision,
    )


def from_file(path: Path, separator: int | None = None) -> Tokenizer:
    """Read a `tokenizer.json`. `separator` is an id; by default `<|endoftext|>`
    separates, and is added if missing.
    """
    try:
        return Tokenizer(tokenizers.Tokenizer.from_file(str(path)), separator)
    except Exception as error:
        raise UserError(
            f"data.tokenizer: '{path}' cannot be read:"
            f" {str(error).partition(chr(10))[0]}"
        ) from None


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


@dataclasses.dataclass(frozen=True)
class TokenSplit:
    """The tokens of one split. Document i is `ids[starts[i]:starts[i + 1]]`, its
    separator first.
    """

    ids: np.ndarray  # (n_tokens,) uint16 or uint32, memory-mapped
    starts: np.ndarray  # (n_documents + 1,) int64, the last one is n_tokens
    # (n_documents,): which text each stretch was cut from; None: all are whole
    sources: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Tokens:
    """A tokenised corpus and what `run.json` records of it under `data`."""

    train: TokenSplit
    validation: TokenSplit
    test: TokenSplit
    tokenizer: Tokenizer
    record: dict[str, Any]
    folder: Path  # within the cache
    # begins each document, if documents must not read one another
    separator: int | None = None

    def batches(self, training: TrainingConfig, seed: int) -> TrainingBatches:
        """Return the batches that a configuration trains on, by update."""
        sizes = training.train_length, training.batch_size * training.accumulation
        return TrainingBatches(self.train.ids, *sizes, seed, self.separator)

    def validation_batches(self, training: TrainingConfig) -> list[Batch]:
        """Return a fixed part of the validation text, in blocks of the training length."""
        sizes = training.train_length, training.batch_size, VALIDATION_SIZE
        uncut = batches.validation_batches(self.validation.ids, *sizes)
        return [
            part
            for batch in uncut
            for part in batch._replace(separator=self.separator).parts(1)
        ]


@dataclasses.dataclass(frozen=True)
class TaskData:
    """A task as data to train on, and what `run.json` records of it. It has the methods
    of `Tokens`.
    """

    task: Task
    offset: int  # a training problem's first token stands at a position from 0 to this
    tokenizer: Tokenizer
    record: dict[str, Any]

    def batches(self, training: TrainingConfig, seed: int) -> ProblemBatches:
        rows = training.batch_size * training.accumulation
        return ProblemBatches(self.task, self.offset, training.train_length, rows, seed)

    def validation_batches(self, training: TrainingConfig) -> list[Batch]:
        problems = batches.fixed_problems(
            self.task, "validation", self.task.longest, VALIDATION_SIZE
        )
        return batches.problem_batch(problems).parts(
            -(-VALIDATION_SIZE // training.batch_size)
        )


def data_of(
    config: DataConfig, cache: str | None = None, saved: Path | None = None
) -> Tokens | TaskData:
    """Return the data of a run: the tokens of a text, or a task. `saved`: its
    tokenizer; the user's may be gone.
    """
    if config.task is None:
        is_file = (
            config.tokenizer not in ("bpe", "bytes")
            and saved is not None
            and saved.is_file()
        )
        return prepare(
            dataclasses.replace(config, tokenizer=str(saved)) if is_file else config,
            cache,
        )
    task = tasks.build(config.task["name"], config.task)
    options = json.dumps(
        {**dataclasses.asdict(task), "name": task.name, "offset": config.offset},
        sort_keys=True,
    )
    tested = [
        batches.fixed_problems(task, "test", length, 64)
        for length in sorted({task.shortest, task.longest})
    ]
    digest = hashlib.sha256(
        "\n".join([options, *map(batches.problems_sha256, tested)]).encode()
    ).hexdigest()
    record = {
        "name": config.name,
        "sha256": digest,
        "task": config.task,
        "offset": config.offset,
    }
    # Each symbol is a word. Its id is its place among the symbols; that of the
    # separator is 0.
    words = tokenizers.Tokenizer(
        models.WordLevel(vocab={symbol: i for i, symbol in enumerate(task.symbols)})
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return TaskData(task, config.offset, Tokenizer(words), record)


def prepare(
    config: DataConfig, cache: str | Path | None, separator: int | None = None
) -> Tokens:
    """Return the tokens of a text, from a cache (None: the user's) or made now;
    `separator` is as in `from_file`.
    """
    loaded, revision = (
        (None, None)
        if config.tokenizer in ("bpe", "bytes")
        else find(config.tokenizer, separator)
    )
    source = text.locate(config)
    key = dataclasses.asdict(config) | dict.fromkeys(
        ("name", "path", "dataset", "revision", "document_mask")
    )
    key |= {"format": FORMAT, "text": source[1], "separator": separator}
    key |= {
        "tokenizer": (
            loaded.sha256
            if loaded
            else [config.tokenizer, importlib.metadata.version("tokenizers")]
        )
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    folder = (
        (Path(os.path.expanduser(cache)) if cache else files.user_cache())
        / "tokens"
        / digest[:16]
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            _write(config, source, loaded, folder)
    record = json.loads((folder / "meta.json").read_text(encoding="utf-8")) | {
        "name": config.name
    }
    record |= {"tokenizer_revision": revision} if revision else {}
    tokenizer, splits = from_file(folder / "tokenizer.json", separator), {}
    for split in text.SPLITS:
        counts = record.get("stretches", {}).get(split)  # stretches of each document
        sources = None if counts is None else np.repeat(np.arange(len(counts)), counts)
        ids = np.memmap(folder / f"{split}.ids", tokenizer.dtype, "r")
        splits[split] = TokenSplit(
            ids, np.load(folder / f"{split}.starts.npy"), sources
        )
    separator = tokenizer.separator if config.document_mask else None
    return Tokens(
        **splits, tokenizer=tokenizer, record=record, folder=folder, separator=separator
    )


def prepare_all(configs: Iterable[Config]) -> list[Tokens]:
    """Make the tokens of several runs before any of them starts, so that a mistake in
    their text stops them all.
    """
    inputs = [
        (config.data, config.runtime.cache)
        for config in configs
        if config.data.task is None
    ]
    return [
        prepare(*arguments)
        for number, arguments in enumerate(inputs)
        if arguments not in inputs[:number]
    ]


def _write(
    config: DataConfig, source: text.Source, loaded: Tokenizer | None, folder: Path
) -> None:
    logger.info("preparing the tokens of data '%s'", config.name)
    with files.atomic_folder(folder) as new:
        splits, record = text.load(config, source, new)
        tokenizer = loaded or raw_bytes()
        if config.tokenizer == "bpe":
            train, order = (
                splits["train"],
                np.random.default_rng(0).permutation(len(splits["train"])),
            )
            rooms = BPE_CHARACTERS + train.sizes[order] - train.sizes[order].cumsum()
            sample = (
                train[i][:room]
                for i, room in zip(order, rooms.tolist(), strict=True)
                if room > 0
            )
            tokenizer = train_bpe(sample, config.vocab_size)
        tokenizer.save(new / "tokenizer.json")
        total = sum(int(texts.sizes.sum()) for texts in splits.values())
        progress = console.Work(total, "tokens of %s of %s characters, about %s left")
        record["tokens"] = {
            split: _encode(tokenizer, texts, new / split, progress)
            for split, texts in splits.items()
        }
        (new / "meta.json").write_text(json.dumps(record, indent=1), "utf-8")
        for documents in new.glob("*.documents"):
            documents.unlink()


def _encode(
    tokenizer: Tokenizer, texts: text.Texts, path: Path, progress: console.Work
) -> int:
    """Write one split's ids and document starts; return its number of tokens."""
    starts, size = [], 0
    with path.with_suffix(".ids").open("xb") as file:
        for begins, characters, ids in tokenizer.encode_pieces(texts):
            if begins:
                starts.append(size)
                ids = np.append(np.uint32(tokenizer.separator), ids)
            size += (
                file.write(ids.astype(tokenizer.dtype).tobytes())
                // tokenizer.dtype().nbytes
            )
            progress.add(characters)
    np.save(path.with_suffix(".starts.npy"), np.array([*starts, size], np.int64))
    return size
