"""Tokens of a corpus: encoded once, kept in a cache folder, memory-mapped.

A split is one stream of ids in which every document begins with the separator. The cache folder's name is a digest of
the text and of all that shapes the tokens, so that equal settings share it and others never do. It is written aside and
renamed into place under a lock, verified before use, and made again if it is damaged. Finding it needs no `datasets`.

What a killed process has finished stays in `<name>.work` beside it, and the next one goes on from there: the documents
on the disk, where each split's are, the tokenizer, and the tokens in parts of some millions. Each has a digest.
"""

import array
import collections
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from posbench import files, machine
from posbench.config.schema import Config, DataConfig, TrainingConfig
from posbench.data import apart, corpus, kept, reading
from posbench.data.batches import Batch, TrainingBatches, validation_batches
from posbench.data.texts import Texts, characters
from posbench.data.tokenizer import Tokenizer, find, from_file, pieces, raw_bytes, train_bpe
from posbench.errors import UserError
from posbench.terminal import console

logger = logging.getLogger(__name__)

FORMAT = 4  # of the cache; raised when the same settings would give other files
BPE_CHARACTERS = 16 * 2**20  # BPE learns from at most this much training text, from documents drawn evenly
BATCH_CHARACTERS = 2**20  # encoded at a time, by each process
PART_TOKENS = 2**22  # that are kept if the process is killed, in whole documents; 8 or 16 MB
ALONE_CHARACTERS = 2**24  # a text of fewer is encoded in this process: others would take longer to start
_MEMORY_OF_ONE = 2**28  # bytes that a process which encodes may take; it takes some 120 MB
VALIDATION_BLOCKS = 256  # blocks of validation text that a loss during training is taken over
SMALL_TEXT = 50_000  # training tokens: fewer are worth a warning
_LARGE_TEXT = 2**24  # bytes, from which on the time that it takes is said
_MEASURED = 2**18  # bytes that the time is estimated by
_ALL_IN_ALL = 1.25  # the time of everything, of that of encoding alone
_PLAIN = (*reading.WHOLE, ".jsonl", ".json", ".csv", ".tsv")
_Encoder = Callable[[Iterable[list[str]]], Iterator[np.ndarray]]  # batches of pieces -> the ids of each piece


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


def prepare(config: DataConfig, cache: Path, separator: int | None = None, n_jobs: int | None = None) -> Tokens:
    """Return the tokens that a configuration means, from the cache or made now.

    What a killed process has finished is used. The tokens depend neither on that nor on `n_jobs`.

    Args:
        cache: folder shared by runs, see `cache_folder`.
        separator: id of the token before each document, where a tokenizer from elsewhere is to have another than ours.
        n_jobs: processes that encode at a time; None = one per core, as far as memory allows.

    Raises:
        UserError: there is no such text or tokenizer, or it cannot be read.
        RunFailed: no room in the cache (reason `disk`).
    """
    own, revision = (None, None) if config.tokenizer in ("bpe", "bytes") else find(config.tokenizer, separator)
    source = corpus.locate(config, cache / "revisions")
    folder = cache / "tokens" / _key(config, source, own, separator)[:16]
    added: dict[str, Any] = {"name": config.name} | ({"tokenizer_revision": revision} if revision else {})
    with kept.locked(folder):
        made = kept.whole(folder, partial(_open, added=added, separator=separator))
        if made is None:
            with files.full_disk_as_failure(folder, source.size):
                _write(config, source, own, folder, n_jobs or _jobs())
            made = _open(folder, added, separator)
        files.delete(_work(folder))
    if len(made.train.ids) < SMALL_TEXT:
        small = "data '%s' is small, %s training tokens, which a model soon knows by heart: give a megabyte or more"
        logger.warning(small, config.name, f"{len(made.train.ids):,}")
    told = "data '%s': %s training tokens, sha256 of the text %s"
    logger.info(told, config.name, f"{len(made.train.ids):,}", made.record["sha256"][:12])
    return made


def prepare_all(configs: Iterable[Config], n_jobs: int | None = None) -> list[Tokens]:
    """Make the tokens of several runs before any of them starts, so that a mistake in their text stops them all.

    Raises:
        UserError: as `prepare`.
    """
    seen: list[tuple[DataConfig, str | None]] = []
    for config in configs:
        needed = (config.data, config.runtime.cache)
        if config.data.task is None and needed not in seen:
            seen.append(needed)
    return [prepare(data, cache_folder(cache), n_jobs=n_jobs) for data, cache in seen]


def cache_folder(setting: str | None) -> Path:
    """Return the cache folder: the setting, or `posbench` in the user's cache; a temporary one if it is unwritable."""
    folder = Path(setting).expanduser() if setting else files.user_cache()
    try:
        (folder / "tokens").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder / "tokens"):
            return folder
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        aside = files.until_exit()
        logger.warning("cache %s cannot be written (%s): tokens are kept in %s for this run only", folder, error, aside)
        return aside


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


def _jobs() -> int:
    """Processes that encode at a time: one per core, as far as memory allows."""
    memory = machine.memory_limit("cpu")
    return max(1, min(machine.cores(), memory[0] // _MEMORY_OF_ONE)) if memory else machine.cores()


def _write(config: DataConfig, source: corpus.Source, own: Tokenizer | None, folder: Path, n_jobs: int) -> None:
    """Read, split and encode the text into a folder beside `folder`, then rename it into place.

    What is finished stays if the process is killed or interrupted, and is removed if it fails.
    """
    work = _work(folder)
    going_on = _is_ours(work)
    told = "going on with the preparation of data '%s'" if going_on else "preparing the tokens of data '%s'%s"
    logger.info(told, config.name, *([] if going_on else [_expected(source)]))
    made = work / "made"
    try:
        made.mkdir(parents=True, exist_ok=True)
        files.remove_stale(made)
        loaded = corpus.load(config, source, work, folder.parents[1] / "documents")
        tokenizer = own or _tokenizer(config, loaded.documents["train"], work / "tokenizer")
        tokenizer.save(made / "tokenizer.json")
        total = sum(int(characters(texts).sum()) for texts in loaded.documents.values())
        apart_from_here = own is not None or total >= ALONE_CHARACTERS
        alone = partial(_encoded, tokenizer)
        encoded = partial(apart.encoded, made / "tokenizer.json", n_jobs=n_jobs) if apart_from_here else alone
        progress = console.Work(total, "tokens of %s of %s characters, about %s left")
        counts = {s: _save(tokenizer, loaded.documents[s], encoded, work, s, progress) for s in corpus.SPLITS}
        kept.seal(made, folder, {**loaded.record, "tokens": counts})
    except Exception:
        files.delete(work)
        raise


def _work(folder: Path) -> Path:
    """Where the tokens of a cache folder are made."""
    return folder.with_name(f"{folder.name}.work")


def _is_ours(work: Path) -> bool:
    """Whether there is a folder to go on with; what is no folder of files, such as a link, is removed."""
    if not os.path.lexists(work):
        return False
    try:
        for path in (work, *work.rglob("*")):
            files.refuse_unusual(path)
    except UserError as error:
        logger.warning("%s: beginning again", error)
        files.delete(work)
    if not work.is_dir():
        files.delete(work)
    return work.is_dir()


def _expected(source: corpus.Source) -> str:
    """An estimate of the time for a large text, from the time that bytes of a first part take; else empty."""
    files_here = [path for names in source.files.values() for path in names.values()]
    plain = [path for path in files_here if path.suffix.lower() in _PLAIN]
    if not plain or (size := sum(path.stat().st_size for path in files_here)) < _LARGE_TEXT:
        return ""
    with max(plain, key=lambda path: path.stat().st_size).open("rb") as file:
        part = file.read(_MEASURED)
    tokenizer, began = raw_bytes(), time.monotonic()
    tokenizer.encode([part.decode(errors="replace")])
    seconds = (time.monotonic() - began) / len(part) * size * _ALL_IN_ALL
    return f": {size / 1e6:,.0f} MB, {_about(seconds)}"


def _about(seconds: float) -> str:
    """A time, rounded as an estimate is."""
    if seconds < 55:
        return f"about {10 * math.ceil(seconds / 10)} seconds"
    count, unit = (round(seconds / 3600), "hour") if seconds > 5400 else (round(seconds / 60), "minute")
    return f"about {count} {unit}{'s' * (count > 1)}"


def _tokenizer(config: DataConfig, train: Sequence[str], place: Path) -> Tokenizer:
    """The tokenizer that is trained for a text, kept at a place; or raw bytes."""
    if config.tokenizer != "bpe":
        return raw_bytes()

    def trained(made: Path) -> dict[str, Any]:
        bpe, size = train_bpe(_sample(train), config.vocab_size), int(characters(train).sum())
        told = "data '%s': BPE of %s tokens, learnt from %s of %s characters of training text"
        logger.info(told, config.name, f"{bpe.vocab_size:,}", f"{min(size, BPE_CHARACTERS):,}", f"{size:,}")
        if bpe.vocab_size < config.vocab_size:
            told = "data '%s' has too little text for data.vocab_size=%d: its vocabulary has %d tokens"
            logger.warning(told, config.name, config.vocab_size, bpe.vocab_size)
        bpe.save(made / "tokenizer.json")
        return {}

    kept.folder(place, trained)
    return from_file(place / "tokenizer.json")


def _sample(texts: Sequence[str]) -> Iterator[str]:
    """Documents in a fixed random order, until they hold `BPE_CHARACTERS`."""
    left = BPE_CHARACTERS
    for i in np.random.default_rng(0).permutation(len(texts)):
        text = texts[int(i)][:left]
        yield text
        left -= len(text)
        if left == 0:
            return


def _encoded(tokenizer: Tokenizer, batches: Iterable[list[str]]) -> Iterator[np.ndarray]:
    return (ids for batch in batches for ids in tokenizer.encode(batch))


def _save(tokenizer: Tokenizer, texts: Texts, encoded: _Encoder, work: Path, split: str, progress: console.Work) -> int:
    """Write one split's ids and document starts into `work`/made; return its number of tokens.

    A document is encoded and written piece by piece, so that memory does not grow with its length. A part ends before
    the document that begins after `PART_TOKENS`. Parts of an earlier process are not made again.
    """
    dtype, made = _dtype(tokenizer), work / "made"
    separator = np.array([tokenizer.separator], dtype=dtype)
    with _Parts(made / f"{split}.ids", work / split, dtype) as parts:
        progress.skip(int(characters(texts)[: parts.documents].sum()))
        coming: collections.deque[tuple[bool, int]] = collections.deque()  # of a piece: whether it begins a document
        for ids in encoded(_batches(texts.select(slice(parts.documents, None)), coming)):
            begins, size = coming.popleft()
            if begins:
                parts.begin(separator)
            _check_ids(ids, tokenizer)
            parts.write(ids.astype(dtype))
            progress.add(size)
        parts.end()
        np.save(made / f"{split}.starts.npy", np.append(parts.starts(), parts.tokens))
        return parts.tokens


class _Parts:
    """The stream of a split as it is written: ids, document starts, and a line for each part that is whole.

    A line has where a part ends and the sha256 of its ids and starts. What does not fit the lines is cut off, so that
    writing goes on after the last whole part.

    Attributes:
        documents, tokens: how many are written; a document counts from its begin on.
    """

    def __init__(self, ids: Path, beside: Path, dtype: type[np.unsignedinteger[Any]]) -> None:
        paths = (ids, Path(f"{beside}.starts"), Path(f"{beside}.parts"))
        self._open = contextlib.ExitStack()
        self._ids, self._starts, self._lines = (self._open.enter_context(path.open("a+b")) for path in paths)
        self.documents = self.tokens = size = 0
        self._width = dtype().itemsize
        self._lines.seek(0)
        for line in self._lines:
            try:
                documents, tokens, digest = json.loads(line)
                self._sha256, self._new = hashlib.sha256(), array.array("q")
                for file, begin, end in (
                    (self._ids, self.tokens * self._width, tokens * self._width),
                    (self._starts, self.documents * 8, documents * 8),
                ):
                    file.seek(begin)
                    while begin < end and (chunk := file.read(min(end - begin, 2**20))):
                        self._sha256.update(chunk)
                        begin += len(chunk)
            except (ValueError, TypeError, OSError):
                break
            if self._sha256.hexdigest() != digest:
                break
            self.documents, self.tokens, size = documents, tokens, size + len(line)
        self._ids.truncate(self.tokens * self._width)
        self._starts.truncate(self.documents * 8)
        self._lines.truncate(size)
        self._part = self.tokens  # where the part that is being written begins
        self._sha256, self._new = hashlib.sha256(), array.array("q")

    def __enter__(self) -> "_Parts":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def begin(self, separator: np.ndarray) -> None:
        """Begin a document, and a part if this one is large enough."""
        if self.tokens - self._part >= PART_TOKENS:
            self.end()
        self._new.append(self.tokens)
        self.documents += 1
        self.write(separator)

    def write(self, ids: np.ndarray) -> None:
        raw = ids.tobytes()
        self._ids.write(raw)
        self._sha256.update(raw)
        self.tokens += len(ids)

    def end(self) -> None:
        """End a part."""
        if not self._new:
            return
        raw = self._new.tobytes()
        self._starts.write(raw)
        self._sha256.update(raw)
        self._ids.flush()
        self._starts.flush()
        self._lines.write(json.dumps([self.documents, self.tokens, self._sha256.hexdigest()]).encode() + b"\n")
        self._lines.flush()
        self._part, self._sha256, self._new = self.tokens, hashlib.sha256(), array.array("q")

    def starts(self) -> np.ndarray:
        """Where each document of whole parts begins: (n,) int64."""
        self._starts.seek(0)
        return np.frombuffer(self._starts.read(), dtype=np.int64)


def _batches(texts: Iterable[str], coming: collections.deque[tuple[bool, int]]) -> Iterator[list[str]]:
    """The pieces of texts, so many at a time; of each is noted whether it begins a text, and its length."""
    batch: list[str] = []
    size = 0
    for text in texts:
        for number, piece in enumerate(pieces(text)):
            coming.append((number == 0, len(piece)))
            batch.append(piece)
            size += len(piece)
            if size >= BATCH_CHARACTERS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _open(folder: Path, added: dict[str, Any], separator: int | None) -> Tokens:
    """Map a cache folder after checking every file against its recorded digest.

    Args:
        added: to the record; what the configuration says and the cache does not.

    Raises:
        OSError, ValueError, KeyError, UserError: a file is missing or is not what was written.
    """
    record = kept.opened(folder)
    tokenizer = from_file(folder / "tokenizer.json", separator)
    stretches = record.get("stretches", {})
    train, validation, test = (_map(folder, split, tokenizer, stretches.get(split)) for split in corpus.SPLITS)
    return Tokens(train, validation, test, tokenizer, {**record, **added}, folder)


def _map(folder: Path, split: str, tokenizer: Tokenizer, stretches: list[int] | None) -> TokenSplit:
    """Map one split.

    Args:
        stretches: how many of its documents were cut from each source document, in turn; None: they are whole.
    """
    dtype = _dtype(tokenizer)
    with (folder / f"{split}.ids").open("rb") as file:  # what is read through the map would count as memory
        while (part := np.fromfile(file, dtype, 2**20)).size:
            _check_ids(part, tokenizer)
    ids = np.memmap(folder / f"{split}.ids", dtype=dtype, mode="r")
    starts = np.load(folder / f"{split}.starts.npy")
    sources = None if stretches is None else np.repeat(np.arange(len(stretches)), stretches)
    if sources is not None and len(sources) != len(starts) - 1:
        raise ValueError(f"{split} has {len(starts) - 1} documents, of which meta.json names {len(sources)}")
    return TokenSplit(ids, starts, sources)


def _dtype(tokenizer: Tokenizer) -> type[np.unsignedinteger[Any]]:
    return np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32


def _check_ids(ids: np.ndarray, tokenizer: Tokenizer) -> None:
    """Refuse ids outside of the vocabulary, when they are written and when they are read: NumPy wraps them silently."""
    if ids.size and int(ids.max()) >= tokenizer.vocab_size:
        raise ValueError(f"token id {int(ids.max())} is outside of the vocabulary of {tokenizer.vocab_size}")
