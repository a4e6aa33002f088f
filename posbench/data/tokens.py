"""The data of a run: the tokens of a text, or the problems of a task.

Tokens are kept in a cache and memory-mapped. Each document begins with the separator.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import itertools
import json
import logging
import math
import os
from collections.abc import Iterable
from errno import EACCES, EPERM, EROFS
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from posbench import files, tasks
from posbench.config.schema import Config, DataConfig, TrainingConfig
from posbench.data import batches, sources, text, tokenizer
from posbench.data.batches import Batch, ProblemBatches, TrainingBatches
from posbench.data.tokenizer import MADE_HERE, Tokenizer
from posbench.errors import UserError
from posbench.tasks.base import SEPARATOR, Task
from posbench.terminal import console

logger = logging.getLogger(__name__)

# the version of the cache, raised when the same settings would give other files
FORMAT = 7
# settings that change no token of a text that is found
NOT_IN_KEY = ("name", "path", "dataset", "revision", "document_mask", "text_sha256")
META = "meta.json"  # what `run.json` records of a text
DIGESTS = "digests"  # in meta.json, not recorded: the digests of what the folder has
# BPE learns from at most this much training text, from documents drawn evenly
BPE_CHARACTERS = 16 * 2**20
# a tokenizer that is read from a file may lose at most this share of the characters, of
# the beginnings of documents of each split
MOST_LOST = 1e-3
LOSS_DOCUMENTS, LOSS_CHARACTERS = 64, 2**14
VALIDATION_SIZE = 256  # blocks of validation text, or problems, of each validation loss


@dataclasses.dataclass(frozen=True)
class TokenSplit:
    """The tokens of one split. Document i is `ids[starts[i]:starts[i + 1]]`, its
    separator first.
    """

    ids: np.ndarray  # (n_tokens,) uint16 or uint32, memory-mapped
    starts: np.ndarray  # (n_documents + 1,) int64, the last one is n_tokens
    # (n_documents,): which text each stretch was cut from; None: all are whole
    sources: np.ndarray | None = None
    # (n_documents,): the first document that has each one's text but for white space;
    # None: only equal tokens make a copy
    same_text: np.ndarray | None = None

    @functools.cached_property
    def firsts(self) -> np.ndarray:
        """The number of the first document that equals each document, (n_documents,).

        Equal documents are one unit of an interval: a copy is no further evidence, nor
        is one with other line ends or spaces.
        """
        seen: dict[bytes, int] = {}
        firsts = []
        for number, (start, end) in enumerate(itertools.pairwise(self.starts.tolist())):
            content = self.ids[start:end].tobytes()
            digest = hashlib.sha256(content).digest()
            firsts.append(seen.setdefault(digest, number))
        of_equal_tokens = np.array(firsts, dtype=np.int64)
        if self.same_text is None:
            return of_equal_tokens
        return self.same_text[of_equal_tokens]


@dataclasses.dataclass(frozen=True)
class Tokens:
    """A tokenised corpus, and what `meta.json` says of it, which a run's record has as
    `data`.
    """

    train: TokenSplit
    validation: TokenSplit
    test: TokenSplit
    tokenizer: Tokenizer
    meta: dict[str, Any]
    folder: Path  # within the cache
    # begins each document, if documents must not read one another
    separator: int | None = None

    def batches(self, training: TrainingConfig, seed: int) -> TrainingBatches:
        """Return the batches that a configuration trains on, by update."""
        rows = training.batch_size * training.accumulation
        length = training.train_length
        return TrainingBatches(self.train.ids, length, rows, seed, self.separator)

    def validation_batches(self, training: TrainingConfig) -> list[Batch]:
        """Return a fixed part of the validation text, in blocks of the training
        length.
        """
        by_document = []
        for batch in batches.validation_batches(
            self.validation.ids,
            training.train_length,
            training.batch_size,
            VALIDATION_SIZE,
        ):
            by_document += batch._replace(separator=self.separator).parts(1)
        return by_document


@dataclasses.dataclass(frozen=True)
class TaskData:
    """A task as data to train on, and what a run's record has of it as `data`. It has
    the methods of `Tokens`.
    """

    task: Task
    offset: int  # a training problem's first token stands at a position from 0 to this
    tokenizer: Tokenizer
    meta: dict[str, Any]

    def batches(self, training: TrainingConfig, seed: int) -> ProblemBatches:
        rows = training.batch_size * training.accumulation
        return ProblemBatches(self.task, self.offset, training.train_length, rows, seed)

    def validation_batches(self, training: TrainingConfig) -> list[Batch]:
        problems = batches.fixed_problems(
            self.task, "validation", self.task.longest, VALIDATION_SIZE
        )
        n_batches = math.ceil(VALIDATION_SIZE / training.batch_size)
        return batches.problem_batch(problems).parts(n_batches)


def data_of(
    config: DataConfig, cache: str | None = None, saved: Path | None = None
) -> Tokens | TaskData:
    """Return the data of a run: the tokens of a text, or a task. `saved`: its
    tokenizer; the user's may be gone.
    """
    if config.task is None:
        if config.tokenizer not in MADE_HERE and saved is not None and saved.is_file():
            config = dataclasses.replace(config, tokenizer=str(saved))
        return prepare(config, cache)

    task = tasks.build(config.task["name"], config.task)
    options = dataclasses.asdict(task) | {"name": task.name, "offset": config.offset}
    facts = [json.dumps(options, sort_keys=True)]
    for length in sorted({task.shortest, task.longest}):
        tested = batches.fixed_problems(task, "test", length, 64)
        facts.append(batches.problems_sha256(tested))
    meta = {
        "name": config.name,
        "sha256": hashlib.sha256("\n".join(facts).encode()).hexdigest(),
        "task": config.task,
        "offset": config.offset,
    }
    return TaskData(task, config.offset, tokenizer.of_symbols(task.symbols), meta)


def prepare_all(configs: Iterable[Config]) -> list[Tokens]:
    """Make the tokens of several runs before any of them starts, so that a mistake in
    their text stops them all.
    """
    prepared: list[tuple[DataConfig, str | None]] = []
    for config in configs:
        wanted = config.data, config.runtime.cache
        if config.data.task is None and wanted not in prepared:
            prepared.append(wanted)
    return [prepare(data, cache) for data, cache in prepared]


def prepare(
    config: DataConfig, cache: str | Path | None, separator: int | None = None
) -> Tokens:
    """Return the tokens of a text, from a cache (None: the user's) or made now;
    `separator` is as in `from_file`.
    """
    loaded, revision = None, None
    if config.tokenizer not in MADE_HERE:
        loaded, revision = tokenizer.find(config.tokenizer, separator)
    source = None
    sha256 = config.text_sha256
    if sha256 is None:
        source = sources.locate(config)
        sha256 = source.sha256

    key = dataclasses.asdict(config) | dict.fromkeys(NOT_IN_KEY)
    del key["tokenizer_file_sha256"]  # the content counts, below
    key["format"] = FORMAT
    key["text"] = sha256
    key["separator"] = separator
    if loaded is None:
        version = importlib.metadata.version("tokenizers")
        key["tokenizer"] = [config.tokenizer, version]
    else:
        key["tokenizer"] = loaded.sha256
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()

    top = Path(os.path.expanduser(cache)) if cache else files.user_cache()
    folder = top / "tokens" / digest[:16]
    # what is finished is read without a lock: it may be another user's
    if fault_of(folder, digest):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            locked = lock(folder).acquire()
        except OSError as error:
            if not cache or error.errno not in (EACCES, EPERM, EROFS):
                raise
            own = files.user_cache()
            logger.warning("%s: the tokens are made in %s instead", error, own)
            return prepare(config, None, separator)
        with locked:
            fault = fault_of(folder, digest)  # another process may have made them
            if fault and folder.is_dir():
                logger.warning("%s: the tokens are made again", fault)
            if fault:
                source = source or sources.same_text(config)
                _write(config, source, loaded, folder, digest)

    tokens = _read(config, folder, separator)
    if revision is not None:
        tokens.meta["tokenizer_revision"] = revision
    return tokens


def lock(folder: Path, timeout: float = -1) -> FileLock:
    """Return the lock of tokens in the cache, for who makes or deletes them; a negative
    `timeout` waits for it.
    """
    return FileLock(f"{folder}.lock", timeout=timeout)


def runs_with(folder: Path) -> list[Path]:
    """Return the run folders that have used tokens of the cache, of any project; they
    may be gone.
    """
    try:
        return [Path(line) for line in _users(folder).read_text("utf-8").splitlines()]
    except FileNotFoundError:
        return []


def note_use(tokens: Tokens | TaskData, run: Path) -> None:
    """Note beside the tokens which run has used them: they are not deleted while it
    exists.
    """
    if isinstance(tokens, TaskData):
        return
    run = run.resolve()
    with contextlib.suppress(OSError):  # the cache may be another user's
        if run not in runs_with(tokens.folder):
            with _users(tokens.folder).open("a", encoding="utf-8") as file:
                file.write(f"{run}\n")


def _users(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.runs")


def fault_of(folder: Path, key: str) -> str:
    """Return what is wrong with a folder of the cache, by the digests in its meta.json:
    an empty text if all its files are as they were written, for this key.
    """
    try:
        meta = files.read_json(folder / META)
    except UserError as error:
        return str(error)
    digests = meta.pop(DIGESTS, None)
    if not isinstance(digests, dict):
        return f"{folder / META} has no {DIGESTS}"
    if digests != _digests(folder, meta, key):
        return f"{folder} is not as it was written"
    return ""


def _digests(folder: Path, meta: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the size and sha256 of each file of a folder of the cache, and a digest of
    the rest of its meta.json and of what it was made for.
    """
    rest = json.dumps([key, meta], sort_keys=True).encode()
    digests: dict[str, Any] = {META: hashlib.sha256(rest).hexdigest()}
    for path in sorted(folder.iterdir()):
        if path.name != META:
            size = path.stat().st_size
            digests[path.name] = {"size": size, "sha256": files.sha256(path).hex()}
    return digests


def _read(config: DataConfig, folder: Path, separator: int | None) -> Tokens:
    """Return the tokens of a folder of the cache, as a configuration names them."""
    meta = files.read_json(folder / META)
    meta.pop(DIGESTS, None)
    meta["name"] = config.name
    made = tokenizer.from_file(folder / "tokenizer.json", separator)
    if not meta["exact_pieces"]:
        made.token_bytes = None

    splits = {}
    for split in text.SPLITS:
        ids = np.memmap(folder / f"{split}.ids", made.dtype, "r")
        starts = np.load(folder / f"{split}.starts.npy")
        same_text = None
        if split != "train":
            same_text = np.load(folder / f"{split}.same_text.npy")
        stretches = meta.get("stretches", {}).get(split)  # of each document
        document_of = None
        if stretches is not None:
            document_of = np.repeat(np.arange(len(stretches)), stretches)
        splits[split] = TokenSplit(ids, starts, document_of, same_text)

    return Tokens(
        **splits,
        tokenizer=made,
        meta=meta,
        folder=folder,
        separator=made.separator if config.document_mask else None,
    )


def _write(
    config: DataConfig,
    source: sources.Source,
    loaded: Tokenizer | None,
    folder: Path,
    key: str,
) -> None:
    """Make the tokens of a text, in a folder that appears when all of them are there,
    in place of a damaged one.
    """
    logger.info("preparing the tokens of data '%s'", config.name)
    with files.atomic_folder(folder) as new:
        splits, meta = text.load(config, source, new)
        n_copies = meta["copies"]["in_training"]
        if n_copies:
            logger.warning(
                "data '%s': %s of %s training documents are copies of others",
                config.name,
                f"{n_copies:,}",
                f"{len(splits['train']):,}",
            )
        if loaded is not None:
            made = loaded
            meta["lost_characters"] = _refuse_lossy(made, splits)
        elif config.tokenizer == "bpe":
            sample = splits["train"].sample(BPE_CHARACTERS)
            made = tokenizer.train_bpe(sample, config.vocab_size)
            if made.vocab_size < config.vocab_size:
                logger.warning(
                    "data.vocab_size: the text gives only %s tokens, not %s",
                    f"{made.vocab_size:,}",
                    f"{config.vocab_size:,}",
                )
        else:
            made = tokenizer.raw_bytes()
        made.save(new / "tokenizer.json")

        total = sum(int(texts.sizes.sum()) for texts in splits.values())
        progress = console.Work(total, "tokens of %s of %s characters, about %s left")
        meta["tokens"] = {}
        is_exact = True
        for split, texts in splits.items():
            size, split_is_exact = _encode(made, texts, new / split, progress)
            meta["tokens"][split] = size
            is_exact = is_exact and split_is_exact
            if split != "train":  # intervals are over held-out text
                same_text = text.first_of_equals(texts)
                np.save(new / f"{split}.same_text.npy", same_text)
        meta["exact_pieces"] = is_exact
        if not is_exact:
            logger.warning(
                "data.tokenizer: its tokens are no exact pieces of this text, so that"
                " there are no bits per byte"
            )
        for documents in new.glob("*.documents"):
            documents.unlink()
        meta = json.loads(json.dumps(meta))
        meta[DIGESTS] = _digests(new, meta, key)
        (new / META).write_text(json.dumps(meta, indent=1), "utf-8")
        if folder.exists():
            # renamed first: a kill meanwhile leaves no half of it
            files.delete(folder.rename(files.temporary(folder)))


def _refuse_lossy(made: Tokenizer, splits: dict[str, text.Texts]) -> float:
    """Return the share of characters that a tokenizer loses. Raise UserError if it is
    too large: a loss would be that of another text.
    """
    sample = []
    for texts in splits.values():
        for document in itertools.islice(texts, LOSS_DOCUMENTS):
            # a cut may go through the first and the last word
            after_first = document[:LOSS_CHARACTERS].strip().split(maxsplit=1)[-1:]
            before_last = "".join(after_first).rsplit(maxsplit=1)[:1]
            sample.append("".join(before_last))
    share, examples = tokenizer.lost(made, sample)
    what = f"{share:.2%} of the characters do not come back, such as {examples!r}"
    if share > MOST_LOST:
        raise UserError(
            f"data.tokenizer: {what}: expected a tokenizer of this text, at most"
            f" {MOST_LOST:.1%}"
        )
    if share:
        logger.warning("data.tokenizer: %s", what)
    return share


def _encode(
    made: Tokenizer, texts: text.Texts, path: Path, progress: console.Work
) -> tuple[int, bool]:
    """Write one split's ids and document starts; return its number of tokens, and
    whether they have the bytes of the text, no more and no less.
    """
    starts = list[int]()
    size = 0
    token_bytes = made.token_bytes
    # of models trained elsewhere it may be a word
    is_ours = made.decode([made.separator]) == SEPARATOR
    is_exact = token_bytes is not None
    with path.with_suffix(".ids").open("xb") as file:
        for begins, piece, ids in made.encode_pieces(texts):
            if is_ours and made.separator in ids:
                raise UserError(
                    f"data.tokenizer: it reads '{SEPARATOR}', which is to separate"
                    " documents alone, within one: expected a tokenizer without that"
                    " word, or a text without it"
                )
            if token_bytes is not None:
                n_bytes = len(piece.encode())
                is_exact = is_exact and token_bytes[ids].sum() == n_bytes
            if begins:
                starts.append(size)
                ids = np.append(np.uint32(made.separator), ids)
            file.write(ids.astype(made.dtype).tobytes())
            size += len(ids)
            progress.add(len(piece))
    np.save(path.with_suffix(".starts.npy"), np.array([*starts, size], np.int64))
    return size, bool(is_exact)
