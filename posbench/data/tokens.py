"""Tokens of a corpus: encoded once, kept in a cache folder, memory-mapped.

A split is one stream of ids in which every document begins with the separator. The cache folder's name is a digest of
the text and of all that shapes the tokens. It is written aside and renamed into place under a lock: it is there as a
whole or not at all. Finding it needs no `datasets`.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from posbench import files
from posbench.config.schema import Config, DataConfig, TrainingConfig
from posbench.data import text
from posbench.data.batches import Batch, TrainingBatches, validation_batches
from posbench.data.paths import expanded
from posbench.data.text import Texts
from posbench.data.tokenizer import Tokenizer, find, from_file, raw_bytes, train_bpe
from posbench.terminal import console

logger = logging.getLogger(__name__)

FORMAT = 5  # of the cache; raised when the same settings would give other files
BPE_CHARACTERS = 16 * 2**20  # BPE learns from at most this much training text, from documents drawn evenly
BATCH_CHARACTERS = 2**20  # encoded at a time
VALIDATION_BLOCKS = 256  # blocks of validation text that a loss during training is taken over
SMALL_TEXT = 50_000  # training tokens: fewer are worth a warning


@dataclasses.dataclass(frozen=True)
class TokenSplit:
    """One split's stream. Document i is `ids[starts[i]:starts[i + 1]]`, its separator first.

    Where stretches of a text are held out, each stands here as a document, and `sources` says what it was cut from.
    """

    ids: np.ndarray  # (n_tokens,) uint16 or uint32, memory-mapped
    starts: np.ndarray  # (n_documents + 1,) int64, the last one is n_tokens
    sources: np.ndarray | None = None  # (n_documents,) int64: number of the source document; None: each is whole


@dataclasses.dataclass(frozen=True)
class Tokens:
    """A tokenised corpus and what `run.json` records of it under `data`."""

    train: TokenSplit
    validation: TokenSplit
    test: TokenSplit
    tokenizer: Tokenizer
    record: dict[str, Any]
    folder: Path  # of the cache

    def batches(self, training: TrainingConfig, seed: int) -> TrainingBatches:
        """What a configuration trains on, by update."""
        per_step = training.batch_size * training.accumulation
        return TrainingBatches(self.train.ids, training.train_length, per_step, seed)

    def validation_batches(self, training: TrainingConfig) -> list[Batch]:
        """A fixed part of the validation text, in blocks of the training length."""
        length = training.train_length
        return list(validation_batches(self.validation.ids, length, training.batch_size, VALIDATION_BLOCKS))


def prepare(config: DataConfig, cache: Path, separator: int | None = None) -> Tokens:
    """Return the tokens that a configuration means, from the cache or made now.

    Args:
        cache: folder shared by runs, see `cache_folder`.
        separator: id of the token before each document, where a tokenizer from elsewhere is to have another than ours.

    Raises:
        UserError: there is no such text or tokenizer, or it cannot be read.
        RunFailed: no room in the cache (reason `disk`).
    """
    given, revision = (None, None) if config.tokenizer in ("bpe", "bytes") else find(config.tokenizer, separator)
    source = text.locate(config)
    folder = cache / "tokens" / _key(config, source, given, separator)[:16]
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{folder}.lock")
    try:
        held = lock.acquire(timeout=1)
    except Timeout:
        logger.info("waiting for another process, which prepares %s", folder)
        held = lock.acquire()
    with held:
        if not folder.is_dir():
            _write(config, source, given, folder)
    record = json.loads((folder / "meta.json").read_text(encoding="utf-8")) | {"name": config.name}
    if revision:
        record["tokenizer_revision"] = revision
    tokenizer = from_file(folder / "tokenizer.json", separator)
    splits = {split: _open(folder / split, tokenizer, record.get("stretches", {}).get(split)) for split in text.SPLITS}
    count, line = record["tokens"]["train"], "data '%s': %s training tokens, sha256 of the text %s"
    logger.info(line, config.name, f"{count:,}", record["sha256"][:12])
    if count < SMALL_TEXT:
        logger.warning("data '%s' is so small that a model memorises it: give a megabyte of text or more", config.name)
    return Tokens(**splits, tokenizer=tokenizer, record=record, folder=folder)


def prepare_all(configs: Iterable[Config]) -> list[Tokens]:
    """Make the tokens of several runs before any of them starts, so that a mistake in their text stops them all."""
    needed = [(config.data, config.runtime.cache) for config in configs if config.data.task is None]
    different = [each for number, each in enumerate(needed) if each not in needed[:number]]
    return [prepare(data, cache_folder(cache)) for data, cache in different]


def cache_folder(setting: str | None) -> Path:
    """Return the cache folder: the setting, or `posbench` in the user's cache."""
    return expanded(setting, "runtime.cache") if setting else files.user_cache()


def _key(config: DataConfig, source: text.Source, given: Tokenizer | None, separator: int | None) -> str:
    """A digest of all that shapes the tokens: the text, how it is split, and the tokenizer."""
    shape: dict[str, Any] = {"format": FORMAT, "text": source.digest, "separator": separator}
    for name in ("source", "column", "splits", "articles", "max_documents", "tokenizer", "test_pieces"):
        shape[name] = getattr(config, name)
    if config.tokenizer == "bpe":
        shape |= {"vocab_size": config.vocab_size, "tokenizers": importlib.metadata.version("tokenizers")}
    elif given is not None:
        shape["tokenizer"] = given.sha256
    return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()


def _write(config: DataConfig, source: text.Source, given: Tokenizer | None, folder: Path) -> None:
    """Read, split and encode the text into the cache."""
    logger.info("preparing the tokens of data '%s'", config.name)
    for stale in folder.parent.glob(f".tmp-*-{folder.name}"):  # of a process that was killed
        files.delete(stale)
    with files.atomic_folder(folder) as new:
        splits, record = text.load(config, source, new)
        tokenizer = given or _tokenizer(config, splits["train"])
        tokenizer.save(new / "tokenizer.json")
        total = sum(int(texts.sizes.sum()) for texts in splits.values())
        progress = console.Work(total, "tokens of %s of %s characters, about %s left")
        counts = {split: _save(tokenizer, texts, new / split, progress) for split, texts in splits.items()}
        (new / "meta.json").write_text(json.dumps(record | {"tokens": counts}, indent=1), "utf-8")
        (new / text.DOCUMENTS).unlink()


def _tokenizer(config: DataConfig, train: Texts) -> Tokenizer:
    """The tokenizer that is trained for a text, or raw bytes."""
    if config.tokenizer == "bytes":
        return raw_bytes()
    bpe = train_bpe(_sample(train), config.vocab_size)
    if bpe.vocab_size < config.vocab_size:
        line = "data '%s' has too little text for data.vocab_size=%d: its vocabulary has %d tokens"
        logger.warning(line, config.name, config.vocab_size, bpe.vocab_size)
    return bpe


def _sample(texts: Texts) -> Iterator[str]:
    """Documents in a fixed random order, until they hold `BPE_CHARACTERS`."""
    left = BPE_CHARACTERS
    for i in np.random.default_rng(0).permutation(len(texts)):
        yield texts[i][:left]
        left -= int(texts.sizes[i])
        if left <= 0:
            return


def _save(tokenizer: Tokenizer, texts: Texts, path: Path, progress: console.Work) -> int:
    """Write one split's ids and document starts; return its number of tokens. Documents are encoded in pieces."""
    starts, size = [], 0
    every = ((number == 0, piece) for each in texts for number, piece in enumerate(tokenizer.pieces(each)))
    with path.with_suffix(".ids").open("xb") as file:
        while batch := list(_taken(every)):
            for (begins, piece), ids in zip(batch, tokenizer.encode([piece for _, piece in batch]), strict=True):
                if begins:
                    starts.append(size)
                    ids = np.append(np.uint32(tokenizer.separator), ids)
                size += len(ids)
                file.write(ids.astype(_dtype(tokenizer)).tobytes())
                progress.add(len(piece))
    np.save(path.with_suffix(".starts.npy"), np.array([*starts, size], np.int64))
    return size


def _taken(pieces: Iterator[tuple[bool, str]]) -> Iterator[tuple[bool, str]]:
    """The next pieces, until they have `BATCH_CHARACTERS`."""
    size = 0
    for begins, piece in pieces:
        yield begins, piece
        size += len(piece)
        if size >= BATCH_CHARACTERS:
            return


def _open(path: Path, tokenizer: Tokenizer, counts: list[int] | None) -> TokenSplit:
    """Map one split; `counts` says how many of its documents were cut from each source, None that they are whole."""
    ids = np.memmap(path.with_suffix(".ids"), dtype=_dtype(tokenizer), mode="r")
    sources = None if counts is None else np.repeat(np.arange(len(counts)), counts)
    return TokenSplit(ids, np.load(path.with_suffix(".starts.npy")), sources)


def _dtype(tokenizer: Tokenizer) -> type[np.unsignedinteger[Any]]:
    return np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
