"""Tokens of a corpus: encoded once, kept in a cache folder, memory-mapped.

A split is one stream of ids in which every document begins with the separator. The cache folder's name is a digest of
the text and of all that shapes the tokens, so that equal settings share it and others never do. It is written aside and
renamed into place under a lock, verified before use, and made again if it is damaged. Finding it needs no `datasets`.
"""

import collections
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from posbench import files
from posbench.config.schema import Config, DataConfig, TrainingConfig
from posbench.data import apart, corpus, reading
from posbench.data.batches import Batch, TrainingBatches, validation_batches
from posbench.data.tokenizer import Tokenizer, find, from_file, pieces, raw_bytes, train_bpe
from posbench.errors import UserError

logger = logging.getLogger(__name__)

FORMAT = 4  # of the cache; raised when the same settings would give other files
BPE_CHARACTERS = 16 * 2**20  # BPE learns from at most this much training text, from documents drawn evenly
BATCH_CHARACTERS = 2**22  # encoded at a time
VALIDATION_BLOCKS = 256  # blocks of validation text that a loss during training is taken over
SMALL_TEXT = 50_000  # training tokens: fewer are worth a warning
TELL_EVERY_SECONDS = 10.0
_LARGEST_META = 2**20  # bytes
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

    def batches(self, training: TrainingConfig, seed: int) -> TrainingBatches:
        """What a configuration trains on, by update."""
        per_step = training.batch_size * training.accumulation
        return TrainingBatches(self.train, training.train_length, per_step, seed)

    def validation_batches(self, training: TrainingConfig) -> list[Batch]:
        """A fixed part of the validation text, in blocks of the training length."""
        length = training.train_length
        return list(validation_batches(self.validation, length, training.batch_size, VALIDATION_BLOCKS))


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
    added: dict[str, Any] = {"name": config.name} | ({"tokenizer_revision": revision} if revision else {})
    with files.full_disk_as_failure(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.with_name(f"{folder.name}.lock")):
        made = _kept(folder, added, separator)
        if made is None:
            with files.full_disk_as_failure(folder, source.size):
                _write(config, source, own, folder)
            made = _open(folder, added, separator)
    if len(made.train.ids) < SMALL_TEXT:
        small = "data '%s' is small, %s training tokens, which a model soon knows by heart: give a megabyte or more"
        logger.warning(small, config.name, f"{len(made.train.ids):,}")
    told = "data '%s': %s training tokens, sha256 of the text %s"
    logger.info(told, config.name, f"{len(made.train.ids):,}", made.record["sha256"][:12])
    return made


def _kept(folder: Path, added: dict[str, Any], separator: int | None) -> Tokens | None:
    """What a cache folder holds; a damaged one is removed, and so is what is no such folder."""
    if not os.path.lexists(folder):
        return None
    try:
        return _open(folder, added, separator)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError) as error:
        logger.warning("token cache %s is damaged (%s): making it again", folder, error)
        files.delete(folder)
        return None


def prepare_all(configs: Iterable[Config]) -> None:
    """Make the tokens of several runs before any of them starts, so that a mistake in their text stops them all.

    Raises:
        UserError: as `prepare`.
    """
    seen: list[tuple[DataConfig, str | None]] = []
    for config in configs:
        needed = (config.data, config.runtime.cache)
        if config.data.task is None and needed not in seen:
            seen.append(needed)
            prepare(config.data, cache_folder(config.runtime.cache))


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


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Let one process at a time prepare these tokens; the lock goes with the process."""
    descriptor = files.lock(path, wait=True)
    try:
        yield
    finally:
        os.close(descriptor)


def _write(config: DataConfig, source: corpus.Source, own: Tokenizer | None, folder: Path) -> None:
    """Read, split and encode the text into a folder beside `folder`, then rename it into place."""
    for stale in folder.parent.glob(f"{folder.name}.*.tmp"):  # of a process that was killed; we hold its lock
        shutil.rmtree(stale, ignore_errors=True)
    logger.info("preparing the tokens of data '%s'%s", config.name, _expected(source))
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", suffix=".tmp", dir=folder.parent) as temporary:
        made = Path(temporary) / "made"
        made.mkdir()
        loaded = corpus.load(config, source, Path(temporary) / "documents")
        tokenizer = own or _tokenizer(config, loaded.documents["train"])
        tokenizer.save(made / "tokenizer.json")
        encoded = partial(apart.encoded, made / "tokenizer.json") if own else partial(_encoded, tokenizer)
        progress = _Progress(sum(map(len, itertools.chain(*loaded.documents.values()))))

        def said(batches: Iterable[list[str]]) -> Iterator[np.ndarray]:
            return encoded(progress.of(batches))

        counts = {s: _save(tokenizer, loaded.documents[s], said, made, s) for s in corpus.SPLITS}
        digests = {path.name: files.sha256(path).hex() for path in sorted(made.iterdir())}
        meta = {"record": {**loaded.record, "tokens": counts}, "files": digests}
        (made / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
        os.replace(made, folder)


def _expected(source: corpus.Source) -> str:
    """How long it may take, where that is worth a word: by the time that a first part takes, as bytes."""
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


class _Progress:
    """Says in the log how far the texts are, every `TELL_EVERY_SECONDS`.

    Args:
        total: characters of all of them.
    """

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self.began = self.told = time.monotonic()

    def of(self, batches: Iterable[list[str]]) -> Iterator[list[str]]:
        """The same batches; each counts as done when the next one is asked for."""
        for batch in batches:
            yield batch
            self.done += sum(map(len, batch))
            now = time.monotonic()
            if now > self.told + TELL_EVERY_SECONDS and self.done < self.total:
                self.told = now
                left = (now - self.began) / self.done * (self.total - self.done)
                told = "tokens of %d %% of %s characters, %s left"
                logger.info(told, 100 * self.done // self.total, f"{self.total:,}", _about(left))


def _tokenizer(config: DataConfig, train: Sequence[str]) -> Tokenizer:
    if config.tokenizer == "bpe":
        made = train_bpe(_sample(train), config.vocab_size)
        if made.vocab_size < config.vocab_size:
            told = "data '%s' has too little text for data.vocab_size=%d: its vocabulary has %d tokens"
            logger.warning(told, config.name, config.vocab_size, made.vocab_size)
        return made
    return raw_bytes()


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


def _save(tokenizer: Tokenizer, texts: Iterable[str], encoded: _Encoder, folder: Path, split: str) -> int:
    """Write one split's ids and document starts; return its number of tokens.

    A document is encoded and written piece by piece, so that memory does not grow with its length.
    """
    dtype = _dtype(tokenizer)
    separator = np.array([tokenizer.separator], dtype=dtype).tobytes()
    starts, n_tokens = [], 0
    begins: collections.deque[bool] = collections.deque()  # whether a piece that is being encoded begins a document
    with (folder / f"{split}.ids").open("wb") as file:
        for ids in encoded(_batches(texts, begins)):
            if begins.popleft():
                starts.append(n_tokens)
                n_tokens += file.write(separator) // dtype().itemsize
            _check_ids(ids, tokenizer)
            n_tokens += file.write(ids.astype(dtype).tobytes()) // dtype().itemsize
    np.save(folder / f"{split}.starts.npy", np.array([*starts, n_tokens], dtype=np.int64))
    return n_tokens


def _batches(texts: Iterable[str], begins: collections.deque[bool]) -> Iterator[list[str]]:
    """The pieces of texts, so many at a time; of each is noted whether it begins a text."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        for number, piece in enumerate(pieces(text)):
            begins.append(number == 0)
            batch.append(piece)
            characters += len(piece)
            if characters >= BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
    if batch:
        yield batch


def _open(folder: Path, added: dict[str, Any], separator: int | None) -> Tokens:
    """Map a cache folder after checking every file against its recorded digest.

    Args:
        added: to the record; what the configuration says and the cache does not.

    Raises:
        OSError, ValueError, KeyError, UserError: a file is missing or is not what was written.
    """
    for path in (folder, *folder.iterdir()):
        files.refuse_unusual(path)
    meta = json.loads(files.read(folder / "meta.json", _LARGEST_META))
    for file, digest in meta["files"].items():
        if Path(file).name != file or files.sha256(folder / file).hex() != digest:
            raise ValueError(f"{file} is not what was written")
    tokenizer = from_file(folder / "tokenizer.json", separator)
    stretches = meta["record"].get("stretches", {})
    train, validation, test = (_map(folder, split, tokenizer, stretches.get(split)) for split in corpus.SPLITS)
    return Tokens(train, validation, test, tokenizer, {**meta["record"], **added})


def _map(folder: Path, split: str, tokenizer: Tokenizer, stretches: list[int] | None) -> TokenSplit:
    """Map one split.

    Args:
        stretches: how many of its documents were cut from each source document, in turn; None: they are whole.
    """
    ids = np.memmap(folder / f"{split}.ids", dtype=_dtype(tokenizer), mode="r")
    _check_ids(ids, tokenizer)
    starts = np.load(folder / f"{split}.starts.npy")
    sources = None if stretches is None else np.repeat(np.arange(len(stretches)), stretches)
    if sources is not None and len(sources) != len(starts) - 1:
        raise ValueError(f"{split} has {len(starts) - 1} documents, of which meta.json names {len(sources)}")
    return TokenSplit(ids, starts, sources)


def _dtype(tokenizer: Tokenizer) -> type[np.unsignedinteger[Any]]:
    return np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32


def _check_ids(ids: np.ndarray, tokenizer: Tokenizer) -> None:
    """NumPy wraps too large ids in silence, so they are looked for on both ways."""
    if ids.size and int(ids.max()) >= tokenizer.vocab_size:
        raise ValueError(f"token id {int(ids.max())} is outside of the vocabulary of {tokenizer.vocab_size}")
