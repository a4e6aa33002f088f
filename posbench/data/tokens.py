"""Tokens of a corpus: encoded once, kept in a cache folder, memory-mapped.

A split is one stream of ids in which every document begins with the separator. The cache folder's name is a digest of
the text and of all that shapes the tokens, so that equal settings share it and others never do. It is written aside and
renamed into place under a lock: it is there as a whole or not at all. Finding it needs no `datasets`.
"""

import array
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from posbench import files
from posbench.config.schema import Config, DataConfig, TrainingConfig
from posbench.data import corpus
from posbench.data.batches import Batch, TrainingBatches, validation_batches
from posbench.data.texts import Texts, characters
from posbench.data.tokenizer import Tokenizer, find, from_file, pieces, raw_bytes, train_bpe
from posbench.terminal import console

logger = logging.getLogger(__name__)

FORMAT = 4  # of the cache; raised when the same settings would give other files
BPE_CHARACTERS = 16 * 2**20  # BPE learns from at most this much training text, from documents drawn evenly
BATCH_CHARACTERS = 2**20  # encoded at a time
VALIDATION_BLOCKS = 256  # blocks of validation text that a loss during training is taken over
SMALL_TEXT = 50_000  # training tokens: fewer are worth a warning
_META = "meta.json"  # of a cache folder


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
    own, revision = (None, None) if config.tokenizer in ("bpe", "bytes") else find(config.tokenizer, separator)
    source = corpus.locate(config, cache / "revisions")
    folder = cache / "tokens" / _key(config, source, own, separator)[:16]
    with _locked(folder):
        if not (folder / _META).is_file():
            with files.full_disk_as_failure(folder, source.size):
                _write(config, source, own, folder)
    made = _open(folder, {"name": config.name} | ({"tokenizer_revision": revision} if revision else {}), separator)
    if len(made.train.ids) < SMALL_TEXT:
        small = "data '%s' is small, %s training tokens, which a model soon knows by heart: give a megabyte or more"
        logger.warning(small, config.name, f"{len(made.train.ids):,}")
    told = "data '%s': %s training tokens, sha256 of the text %s"
    logger.info(told, config.name, f"{len(made.train.ids):,}", made.record["sha256"][:12])
    return made


def prepare_all(configs: Iterable[Config]) -> list[Tokens]:
    """Make the tokens of several runs before any of them starts, so that a mistake in their text stops them all.

    Raises:
        UserError: as `prepare`.
    """
    seen: list[tuple[DataConfig, str | None]] = []
    for config in configs:
        needed = (config.data, config.runtime.cache)
        if config.data.task is None and needed not in seen:
            seen.append(needed)
    return [prepare(data, cache_folder(cache)) for data, cache in seen]


def cache_folder(setting: str | None) -> Path:
    """Return the cache folder: the setting, or `posbench` in the user's cache."""
    return Path(setting).expanduser() if setting else files.user_cache()


def _key(config: DataConfig, source: corpus.Source, own: Tokenizer | None = None, separator: int | None = None) -> str:
    """A digest of all that shapes the tokens: the text, how it is split, and the tokenizer."""
    shape: dict[str, Any] = {
        "format": FORMAT,
        "text": source.digest,
        "source": config.source,
        "column": config.column,
        "splits": config.splits,
        "articles": config.articles,
        "max_documents": config.max_documents,
        "tokenizer": config.tokenizer,
    }
    if config.tokenizer == "bpe":
        shape |= {"vocab_size": config.vocab_size, "tokenizers": importlib.metadata.version("tokenizers")}
    elif own is not None:
        shape["tokenizer"] = own.sha256
    if separator is not None:
        shape["separator"] = separator
    if config.test_pieces is not None:  # so that tokens of before are found again
        shape["test_pieces"] = config.test_pieces
    return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time make a cache folder; the lock goes with the process."""
    with files.full_disk_as_failure(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    descriptor = files.lock(folder.with_name(f"{folder.name}.lock"), wait=True)
    try:
        yield
    finally:
        os.close(descriptor)


def _write(config: DataConfig, source: corpus.Source, own: Tokenizer | None, folder: Path) -> None:
    """Read, split and encode the text into a folder beside `folder`, then rename it into place."""
    logger.info("preparing the tokens of data '%s'", config.name)
    for stale in folder.parent.glob(f".tmp-*-{folder.name}"):  # of a process that was killed
        files.delete(stale)
    work = files.temporary(folder)
    made = work / "made"
    try:
        made.mkdir(parents=True)
        loaded = corpus.load(config, source, work)
        tokenizer = own or _tokenizer(config, loaded.documents["train"])
        tokenizer.save(made / "tokenizer.json")
        total = sum(int(characters(texts).sum()) for texts in loaded.documents.values())
        progress = console.Work(total, "tokens of %s of %s characters, about %s left")
        counts = {split: _save(tokenizer, loaded.documents[split], made, split, progress) for split in corpus.SPLITS}
        (made / _META).write_text(json.dumps({"record": {**loaded.record, "tokens": counts}}, indent=1), "utf-8")
        files.delete(folder)
        os.rename(made, folder)
    finally:
        files.delete(work)


def _tokenizer(config: DataConfig, train: Sequence[str]) -> Tokenizer:
    """The tokenizer that is trained for a text, or raw bytes."""
    if config.tokenizer != "bpe":
        return raw_bytes()
    bpe, size = train_bpe(_sample(train), config.vocab_size), int(characters(train).sum())
    told = "data '%s': BPE of %s tokens, learnt from %s of %s characters of training text"
    logger.info(told, config.name, f"{bpe.vocab_size:,}", f"{min(size, BPE_CHARACTERS):,}", f"{size:,}")
    if bpe.vocab_size < config.vocab_size:
        told = "data '%s' has too little text for data.vocab_size=%d: its vocabulary has %d tokens"
        logger.warning(told, config.name, config.vocab_size, bpe.vocab_size)
    return bpe


def _sample(texts: Sequence[str]) -> Iterator[str]:
    """Documents in a fixed random order, until they hold `BPE_CHARACTERS`."""
    left = BPE_CHARACTERS
    for i in np.random.default_rng(0).permutation(len(texts)):
        text = texts[int(i)][:left]
        yield text
        left -= len(text)
        if left == 0:
            return


def _save(tokenizer: Tokenizer, texts: Texts, folder: Path, split: str, progress: console.Work) -> int:
    """Write one split's ids and document starts into a folder; return its number of tokens.

    A document is encoded and written piece by piece, so that memory does not grow with its length.
    """
    dtype = _dtype(tokenizer)
    separator = np.array([tokenizer.separator], dtype=dtype).tobytes()
    starts, n_tokens = array.array("q"), 0
    with (folder / f"{split}.ids").open("xb") as file:
        for batch in _batches(texts):
            for (begins, piece), ids in zip(batch, tokenizer.encode([piece for _, piece in batch]), strict=True):
                if begins:
                    starts.append(n_tokens)
                    file.write(separator)
                    n_tokens += 1
                _check_ids(ids, tokenizer)
                file.write(ids.astype(dtype).tobytes())
                n_tokens += len(ids)
                progress.add(len(piece))
    np.save(folder / f"{split}.starts.npy", np.array([*starts, n_tokens], dtype=np.int64))
    return n_tokens


def _batches(texts: Iterable[str]) -> Iterator[list[tuple[bool, str]]]:
    """The pieces of texts, so many at a time, each with whether it begins a text."""
    batch: list[tuple[bool, str]] = []
    size = 0
    for text in texts:
        for number, piece in enumerate(pieces(text)):
            batch.append((number == 0, piece))
            size += len(piece)
            if size >= BATCH_CHARACTERS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _open(folder: Path, added: dict[str, Any], separator: int | None) -> Tokens:
    """Map a cache folder.

    Args:
        added: to the record; what the configuration says and the cache does not.
    """
    record = json.loads((folder / _META).read_text(encoding="utf-8"))["record"]
    tokenizer = from_file(folder / "tokenizer.json", separator)
    stretches = record.get("stretches", {})
    train, validation, test = (_map(folder, split, tokenizer, stretches.get(split)) for split in corpus.SPLITS)
    return Tokens(train, validation, test, tokenizer, {**record, **added}, folder)


def _map(folder: Path, split: str, tokenizer: Tokenizer, stretches: list[int] | None) -> TokenSplit:
    """Map one split.

    Args:
        stretches: how many of its documents were cut from each source document, in turn; None: they are whole.
    """
    ids = np.memmap(folder / f"{split}.ids", dtype=_dtype(tokenizer), mode="r")
    sources = None if stretches is None else np.repeat(np.arange(len(stretches)), stretches)
    return TokenSplit(ids, np.load(folder / f"{split}.starts.npy"), sources)


def _dtype(tokenizer: Tokenizer) -> type[np.unsignedinteger[Any]]:
    return np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32


def _check_ids(ids: np.ndarray, tokenizer: Tokenizer) -> None:
    """Refuse ids outside of the vocabulary: NumPy wraps them silently."""
    if ids.size and int(ids.max()) >= tokenizer.vocab_size:
        raise ValueError(f"token id {int(ids.max())} is outside of the vocabulary of {tokenizer.vocab_size}")
