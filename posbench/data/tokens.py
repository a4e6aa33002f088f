"""Tokens of a corpus: encoded once, kept in a cache folder, memory-mapped.

The folder's name is a digest of the text and of all that shapes the tokens. It is there as a whole or not at all.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from posbench import files
from posbench.config.schema import Config, DataConfig, TrainingConfig
from posbench.data import text
from posbench.data.batches import Batch, TrainingBatches, validation_batches
from posbench.data.tokenizer import Tokenizer, find, from_file, raw_bytes, train_bpe
from posbench.terminal import console

logger = logging.getLogger(__name__)

FORMAT = 5  # of the cache; raised when the same settings would give other files
BPE_CHARACTERS = 16 * 2**20  # BPE learns from at most this much training text, from documents drawn evenly
VALIDATION_BLOCKS = 256  # blocks of validation text that a loss during training is taken over


@dataclasses.dataclass(frozen=True)
class TokenSplit:
    """One split's stream. Document i is `ids[starts[i]:starts[i + 1]]`, its separator first."""

    ids: np.ndarray  # (n_tokens,) uint16 or uint32, memory-mapped
    starts: np.ndarray  # (n_documents + 1,) int64, the last one is n_tokens
    sources: np.ndarray | None = (
        None  # (n_documents,): the text that each, a stretch, was cut from; None: all are whole
    )


@dataclasses.dataclass(frozen=True)
class Tokens:
    """A tokenised corpus and what `run.json` records of it under `data`."""

    train: TokenSplit
    validation: TokenSplit
    test: TokenSplit
    tokenizer: Tokenizer
    record: dict[str, Any]
    folder: Path  # of the cache
    separator: int | None = None  # between documents that training does not read beside one another

    def batches(self, training: TrainingConfig, seed: int) -> TrainingBatches:
        """Return what a configuration trains on, by update."""
        sizes = training.train_length, training.batch_size * training.accumulation
        return TrainingBatches(self.train.ids, *sizes, seed, self.separator)

    def validation_batches(self, training: TrainingConfig) -> list[Batch]:
        """Return a fixed part of the validation text, in blocks of the training length."""
        sizes = training.train_length, training.batch_size
        whole = validation_batches(self.validation.ids, *sizes, VALIDATION_BLOCKS)
        return [part for batch in whole for part in batch._replace(separator=self.separator).parts(1)]


def prepare(config: DataConfig, cache: Path, separator: int | None = None) -> Tokens:
    """Return the tokens that a configuration means, from the cache or made now.

    `separator` is the id of the token before each document, where a tokenizer from elsewhere is to have one of its own.
    """
    given, revision = (None, None) if config.tokenizer in ("bpe", "bytes") else find(config.tokenizer, separator)
    source = text.locate(config)
    folder = cache / "tokens" / _key(config, source, given, separator)[:16]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            _write(config, source, given, folder)
    record = json.loads((folder / "meta.json").read_text(encoding="utf-8")) | {"name": config.name}
    record |= {"tokenizer_revision": revision} if revision else {}
    logger.info("data '%s': %s training tokens", config.name, f"{record['tokens']['train']:,}")
    tokenizer, splits = from_file(folder / "tokenizer.json", separator), {}
    for split in text.SPLITS:
        counts = record.get("stretches", {}).get(split)  # of each source document in turn
        sources = None if counts is None else np.repeat(np.arange(len(counts)), counts)
        ids = np.memmap(folder / f"{split}.ids", _dtype(tokenizer), "r")
        splits[split] = TokenSplit(ids, np.load(folder / f"{split}.starts.npy"), sources)
    separator = tokenizer.separator if config.document_mask else None
    return Tokens(**splits, tokenizer=tokenizer, record=record, folder=folder, separator=separator)


def prepare_all(configs: Iterable[Config]) -> list[Tokens]:
    """Make the tokens of several runs before any of them starts, so that a mistake in their text stops them all."""
    needed = [(config.data, config.runtime.cache) for config in configs if config.data.task is None]
    different = [each for number, each in enumerate(needed) if each not in needed[:number]]
    return [prepare(data, cache_folder(cache)) for data, cache in different]


def cache_folder(setting: str | None) -> Path:
    """Return the cache folder: the setting, or `posbench` in the user's cache."""
    return Path(os.path.expanduser(setting)) if setting else files.user_cache()


def _key(config: DataConfig, source: text.Source, given: Tokenizer | None, separator: int | None) -> str:
    shape: dict[str, Any] = {"format": FORMAT, "text": source.digest, "separator": separator}
    for name in ("source", "column", "splits", "articles", "max_documents", "tokenizer", "test_pieces"):
        shape[name] = getattr(config, name)
    if config.tokenizer == "bpe":
        shape |= {"vocab_size": config.vocab_size, "tokenizers": importlib.metadata.version("tokenizers")}
    elif given is not None:
        shape["tokenizer"] = given.sha256
    return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()


def _write(config: DataConfig, source: text.Source, given: Tokenizer | None, folder: Path) -> None:
    logger.info("preparing the tokens of data '%s'", config.name)
    for stale in folder.parent.glob(f".tmp-*-{folder.name}"):  # of a process that was killed
        files.delete(stale)
    with files.atomic_folder(folder) as new:
        splits, record = text.load(config, source, new)
        tokenizer = given or raw_bytes()
        if config.tokenizer == "bpe":
            tokenizer = train_bpe(_sample(splits["train"]), config.vocab_size)
        tokenizer.save(new / "tokenizer.json")
        total = sum(int(texts.sizes.sum()) for texts in splits.values())
        progress = console.Work(total, "tokens of %s of %s characters, about %s left")
        counts = {split: _save(tokenizer, texts, new / split, progress) for split, texts in splits.items()}
        (new / "meta.json").write_text(json.dumps(record | {"tokens": counts}, indent=1), "utf-8")
        for documents in new.glob("*.documents"):
            documents.unlink()


def _sample(train: text.Texts) -> Iterator[str]:
    """Documents in a fixed random order, until they hold `BPE_CHARACTERS`."""
    order = np.random.default_rng(0).permutation(len(train))
    for i, end in zip(order, train.sizes[order].cumsum(), strict=True):
        if (room := BPE_CHARACTERS - int(end - train.sizes[i])) > 0:
            yield train[i][:room]


def _save(tokenizer: Tokenizer, texts: text.Texts, path: Path, progress: console.Work) -> int:
    """Write one split's ids and document starts; return its number of tokens."""
    starts, size = [], 0
    with path.with_suffix(".ids").open("xb") as file:
        for begins, characters, ids in tokenizer.encode_pieces(texts):
            if begins:
                starts.append(size)
                ids = np.append(np.uint32(tokenizer.separator), ids)
            size += len(ids)
            file.write(ids.astype(_dtype(tokenizer)).tobytes())
            progress.add(characters)
    np.save(path.with_suffix(".starts.npy"), np.array([*starts, size], np.int64))
    return size


def _dtype(tokenizer: Tokenizer) -> type[np.unsignedinteger[Any]]:
    return np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
