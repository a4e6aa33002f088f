"""Documents in three splits, from the standard library, from files, or from the HuggingFace hub.

In two steps, so that a run on cached tokens pays for the first alone: `locate` says cheaply which text is meant (a
digest of the files, or the hub's commit), `load` reads it to the disk, so that memory does not grow with the text, and
splits it.

How documents are split (`record["split"]`):
- `given`: by the source. If validation or test is missing, the other one is halved; training text is left alone.
- `document`: 5 % of the documents each, chosen by the hash of their text, so that equal documents stay together. The
  test part grows to `data.test_pieces` documents while training keeps 70 % of the characters. Of the built-in corpus
  6 % and 20 %, chosen by the hash of module names. Training documents that share a passage of 64 words with validation
  or test text are dropped.
- `stretches`, under 20 documents: separate stretches of each one's text, `data.test_pieces` in all, see `_stretches`.
- `contiguous`, under 20 documents if `data.test_pieces` is None: the last 5 % and 5 % of each one's text.

What training text shares with the held-out text stands in `record["copies"]`, as it was before anything was dropped.
"""

import dataclasses
import hashlib
import itertools
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from posbench import files
from posbench.config.schema import DataConfig
from posbench.data import copies, hub, reading
from posbench.data import texts as on_disk
from posbench.data.texts import Span, Texts
from posbench.errors import UserError

logger = logging.getLogger(__name__)

SPLITS = ("train", "validation", "test")
HELD_OUT = (0.05, 0.05)  # shares of validation and test
# The built-in corpus is small: a larger share, for some fifty test documents of more than a thousand tokens.
BUILTIN_HELD_OUT = (0.06, 0.20)
FEWEST_DOCUMENTS = 20  # to split by document
TRAINING = 0.70  # of the characters at least, as far as `data.test_pieces` decides
STRETCH = 2**13  # characters that a held-out stretch should have: some 2,000 tokens of context before its targets
FEWEST_STRETCHES = 8  # of a short text: fewer would give no interval, so they are shorter instead
MUCH_SHARED = 0.01  # of the held-out passages, in training text that is left alone: worth a warning
MUCH_DROPPED = 0.10  # of the training text: worth a warning


@dataclasses.dataclass(frozen=True)
class Source:
    """Which text a configuration means: its files by split ("" = not given), or a commit on the hub."""

    files: dict[str, dict[str, Path]]  # split -> name -> file
    revision: str | None
    digest: str  # over the names and bytes of the files, or the hub's names and commit

    @property
    def size(self) -> int | None:
        """Most bytes that its tokens can take, two for each byte of text; None if the text is not here."""
        paths = [path for names in self.files.values() for path in names.values()]
        return 2 * sum(path.stat().st_size for path in paths) if paths else None


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents by split, on the disk, and what `run.json` records of them."""

    documents: dict[str, Texts]
    record: dict[str, Any]


def locate(config: DataConfig, remembered: Path) -> Source:
    """Find the text without reading it into documents and without importing `datasets`.

    Args:
        remembered: folder for the answers of the hub, for when it cannot be asked.

    Raises:
        UserError: nothing there, with the nearest name; a hub that can be neither asked nor remembered.
    """
    if config.source == "hub" and config.path is None:
        if config.splits and ("train" not in config.splits or not set(config.splits) <= set(SPLITS)):
            raise UserError(f"data.splits names {', '.join(config.splits)}: expected train, and validation and test")
        if config.dataset is None:
            raise UserError("data.dataset is missing: expected a name on the hub, such as Salesforce/wikitext")
        commit = hub.resolve(config.dataset, config.subset, config.revision, remembered)
        return Source({}, commit, _digest(str(part).encode() for part in (config.dataset, config.subset, commit)))
    if config.source == "builtin":
        found: dict[str, dict[str, Path]] = {"": dict(reading.builtin_modules())}
    else:
        found = local_files(config)
    each = ((split, name, path) for split, names in found.items() for name, path in names.items())
    parts = (part for s, name, path in each for part in (s.encode(), os.fsencode(name), _sha256(path)))
    return Source(found, None, _digest(parts))


def _sha256(path: Path) -> bytes:
    try:
        return files.sha256(path)
    except OSError as error:
        raise UserError(f"data.path: the text {path} cannot be read: {error.strerror}") from None


def load(config: DataConfig, source: Source, folder: Path) -> Corpus:
    """Read the documents of a located source into files of a folder and split them.

    Raises:
        UserError: no text, bytes that are not UTF-8, a column or split that is not there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    counts = on_disk.write(folder, _read(config, source))
    everything = Texts.of(folder)
    ends = itertools.accumulate(counts.values(), initial=0)
    parts = zip(counts, itertools.pairwise(ends), strict=True)
    documents = {split: everything.select(slice(*place)) for split, place in parts}
    stretches: dict[str, list[int]] = {}
    if set(documents) == {"train"}:
        documents = {"": documents["train"]}
    texts = documents.get("")
    if texts is None:
        split, documents = "given", _complete(documents, config.name)
    elif config.source == "builtin":
        names = [hashlib.sha256(name.encode()).digest() for name in source.files[""]][: len(texts)]
        split, documents = "document", _by_document(texts, np.array(names, dtype="S32"), BUILTIN_HELD_OUT)
    elif len(texts) >= FEWEST_DOCUMENTS:
        split, documents = "document", _by_document(texts, _keys(texts), HELD_OUT, config.test_pieces or 0)
    else:
        sizes = on_disk.characters(texts).tolist()
        if config.test_pieces is None:
            split, spans = "contiguous", _contiguous(sizes)
        else:
            split, (spans, stretches) = "stretches", _stretches(sizes, config.test_pieces)
        documents = {s: texts.cut(spans[s]) for s in SPLITS}
    if empty := [s for s in SPLITS if not len(documents[s])]:
        raise UserError(
            f"data '{config.name}': no document is left for {' and '.join(empty)}, since equal ones stay together: "
            "take repeated documents out, or give splits of your own"
        )
    documents, shared = _without_copies(documents, split, config.name)
    record = {
        "name": config.name,
        "revision": source.revision,
        "sha256": _digest(part for s in SPLITS for part in itertools.chain([s.encode()], documents[s].raws())),
        "split": split,
        "documents": {s: len(documents[s]) for s in SPLITS},
        "copies": shared,
        **({"stretches": stretches} if stretches else {}),  # of each document in turn, by split
    }
    return Corpus(documents, record)


def local_files(config: DataConfig) -> dict[str, dict[str, Path]]:
    """The files of `data.path` by split and name. The only split is "" where the files give none.

    Raises:
        UserError: no file there that can be read, or as `reading.by_split`.
    """
    if not config.path:
        raise UserError("data.path is missing: expected a file, a folder or a glob, such as data.path=novels/")
    found = reading.find(config.path)
    root = Path(config.path).expanduser()
    if not root.is_dir():  # one file, or a glob
        root = Path(os.path.commonpath([path.parent for path in found]))
    splits = {"": found} if len(found) == 1 else reading.by_split(found, root) or {"": found}
    return {
        split: {path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path): path for path in paths}
        for split, paths in splits.items()
    }


def _read(config: DataConfig, source: Source) -> dict[str, Iterator[str]]:
    """The documents of each split that the source has, read one after another."""
    if not source.files:
        assert config.dataset is not None and source.revision is not None
        rows = hub.Rows(config.dataset, config.subset, source.revision, config.column)
        splits = config.splits or hub.own_splits(rows)
        return {
            ours: hub.documents(rows, theirs, config.articles, config.max_documents) for ours, theirs in splits.items()
        }
    return {
        split: reading.read([*paths.values()], config.column, config.articles, config.max_documents)
        for split, paths in source.files.items()
    }


def _complete(given: dict[str, Texts], name: str) -> dict[str, Texts]:
    """Halve the given held-out split if the other is missing."""
    if len(given) == 3:
        return given
    (there,) = set(given) - {"train"}
    (missing,) = set(SPLITS) - set(given)
    logger.info("data '%s' has no %s split: it gets one half of %s", name, missing, there)
    validation, test = _halves(given[there])
    return {"train": given["train"], "validation": validation, "test": test}


def _halves(texts: Texts) -> tuple[Texts, Texts]:
    if len(texts) < FEWEST_DOCUMENTS:
        sizes = [*enumerate(on_disk.characters(texts).tolist())]
        return (
            texts.cut((i, 0, size // 2) for i, size in sizes),
            texts.cut((i, size // 2, size) for i, size in sizes),
        )
    first, second = _parts(_keys(texts), (0.5,))
    return texts.select(np.sort(first)), texts.select(np.sort(second))


def _keys(texts: Texts) -> np.ndarray:
    """The sha256 of each document: (n,) S32."""
    assert texts.keys is not None  # these are whole documents
    return texts.keys


def _by_document(texts: Texts, keys: np.ndarray, shares: tuple[float, float], test_pieces: int = 0) -> dict[str, Texts]:
    """Give the documents with the lowest keys to validation, the next ones to test, the others to training.

    Args:
        test_pieces: test documents that are wanted; more than their share only while training keeps `TRAINING`.
    """
    validation, test, train = _parts(keys, (shares[0], sum(shares)))
    if len(test) < test_pieces:
        moved = _affordable(texts, train, test_pieces - len(test))
        test, train = np.concatenate([test, train[:moved]]), train[moved:]
    parts = {"train": train, "validation": validation, "test": test}
    return {split: texts.select(np.sort(part)) for split, part in parts.items()}


def _affordable(texts: Texts, train: np.ndarray, wanted: int) -> int:
    """How many of the first training documents can be held out as well; equal ones stay together."""
    sizes, keys = on_disk.characters(texts), _keys(texts)
    left, least = sizes[train].sum(), TRAINING * sizes.sum()
    moved = 0
    while moved < wanted:
        end = moved + 1
        while end < len(train) and keys[train[end]] == keys[train[moved]]:
            end += 1
        left -= sizes[train[moved:end]].sum()
        if left < least or end == len(train):
            break
        moved = end
    return moved


def _parts(keys: np.ndarray, cuts: tuple[float, ...]) -> list[np.ndarray]:
    """Order documents by their keys and cut at these shares, never between equal keys."""
    order = np.argsort(keys, kind="stable")
    ends = [0]
    for cut in cuts:
        end = max(ends[-1] + 1, round(cut * len(order)))
        while end < len(order) and keys[order[end]] == keys[order[end - 1]]:
            end += 1
        ends.append(end)
    return [order[a:b] for a, b in itertools.pairwise([*ends, len(order)])]


def _contiguous(sizes: Sequence[int]) -> dict[str, list[Span]]:
    """Cut texts of so many characters at 90 % and 95 %."""
    spans: dict[str, list[Span]] = {split: [] for split in SPLITS}
    for i, size in enumerate(sizes):
        validation, test = (int(share * size) for share in HELD_OUT)
        cuts = (0, size - validation - test, size - test, size)
        for split, (first, end) in zip(SPLITS, itertools.pairwise(cuts), strict=True):
            spans[split].append((i, first, end))
    return spans


def _stretches(sizes: Sequence[int], wanted: int) -> tuple[dict[str, list[Span]], dict[str, list[int]]]:
    """Hold out separate stretches of each text, evenly spread; what lies between two holes is a training document.

    Each text is cut into equal parts. In the middle of a part stands a hole: a validation stretch, then a test stretch.
    All texts give the same share of their characters: 5 % for validation, and for test so much that stretches have
    `STRETCH` characters, but 5 % at least and 25 % at most. A text too short for stretches of that size gets fewer of
    them. Below `FEWEST_STRETCHES` in all they get shorter instead.

    Args:
        sizes: characters of each text.
        wanted: test stretches of all texts together, rounded up to the same number for each.

    Returns:
        The pieces by split, and how many of the pieces of validation and test are of each text.
    """
    of_validation = HELD_OUT[0]
    share = min(max(HELD_OUT[1], wanted * STRETCH / sum(sizes)), 1 - TRAINING - of_validation)
    most, fewest = (-(-number // len(sizes)) for number in (wanted, min(wanted, FEWEST_STRETCHES)))
    spans: dict[str, list[Span]] = {split: [] for split in SPLITS}
    counts: dict[str, list[int]] = {split: [] for split in SPLITS[1:]}
    for number, size in enumerate(sizes):
        holes = min(most, max(fewest, int(share * size / STRETCH)))
        validation, test = (int(part * size / holes) for part in (of_validation, share))
        end = 0
        for i in range(holes):
            start = (2 * i + 1) * size // (2 * holes) - (validation + test) // 2
            spans["train"].append((number, end, start))
            end = start + validation + test
            spans["validation"].append((number, start, start + validation))
            spans["test"].append((number, start + validation, end))
        spans["train"].append((number, end, size))
        for own in counts.values():
            own.append(holes)
    return spans, counts


def _without_copies(documents: dict[str, Texts], split: str, name: str) -> tuple[dict[str, Texts], dict[str, Any]]:
    """Drop training documents that share a passage with held-out text, if whole documents were split by us.

    Returns:
        The documents, and what `record["copies"]` says: the shares are of 1, and of before anything was dropped.

    Raises:
        UserError: nothing would be left to train on.
    """
    train = documents["train"]
    found = copies.find([documents["validation"], documents["test"]], train)
    dropped = found.documents if split == "document" else []
    what = f"passages of {copies.PASSAGE_WORDS} words"
    looked = f"; {found.train_checked:.0%} of the training text was looked through" if found.train_checked < 1 else ""
    if dropped:
        if len(dropped) == len(train):
            raise UserError(
                f"data '{name}': every training document shares {what} with validation or test text, as a licence in "
                "each would: take it out, or give splits of your own in folders train, validation and test"
            )
        documents = {**documents, "train": train.select(np.delete(np.arange(len(train)), dropped))}
        line = (
            "data '%s': left out %d of %d training documents (%.1f %% of the text) that share %s with held-out text%s"
        )
        level = logging.WARNING if found.text > MUCH_DROPPED else logging.INFO
        logger.log(level, line, name, len(dropped), len(train), 100 * found.text, what, looked)
    elif found.shared > MUCH_SHARED:
        line = "data '%s': %.1f %% of the held-out %s stand in the training text, too%s"
        logger.warning(line, name, 100 * found.shared, what, looked)
    return documents, {
        "passage_words": copies.PASSAGE_WORDS,
        "shared": round(found.shared, 6),
        "dropped_documents": len(dropped),
        "dropped_text": round(found.text, 6) if dropped else 0.0,
        "held_out_checked": round(found.held_out_checked, 6),
        "train_checked": round(found.train_checked, 6),
    }


def _digest(parts: Iterable[bytes]) -> str:
    """sha256 over parts, each preceded by its length, so that no two lists of parts agree by accident."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
