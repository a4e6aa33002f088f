"""Documents in three splits, from the standard library, from files, or from the HuggingFace hub.

In two steps, so that a run on cached tokens pays for the first alone: `locate` says cheaply which text is meant (a
digest of the files, or the hub's commit), `load` reads it and splits it.

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
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from posbench import files
from posbench.config.schema import DataConfig
from posbench.data import copies, hub, reading
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
    """Documents by split, possibly memory-mapped, and what `run.json` records of them."""

    documents: dict[str, Sequence[str]]
    record: dict[str, Any]


def locate(config: DataConfig, remembered: Path) -> Source:
    """Find the text without reading it into documents and without importing `datasets`.

    Args:
        remembered: folder for the answers of the hub, for when it cannot be asked.

    Raises:
        UserError: nothing there, with the nearest name; a hub that can be neither asked nor remembered.
    """
    if config.max_documents is not None and config.max_documents < 1:
        raise UserError(f"data.max_documents is {config.max_documents}: expected at least 1, or null for all")
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
        found = _local_files(config)
    each = ((split, name, path) for split, names in found.items() for name, path in names.items())
    parts = (part for s, name, path in each for part in (s.encode(), os.fsencode(name), _sha256(path)))
    return Source(found, None, _digest(parts))


def _sha256(path: Path) -> bytes:
    try:
        return files.sha256(path)
    except OSError as error:
        raise UserError(f"data.path: the text {path} cannot be read: {error.strerror}") from None


def load(config: DataConfig, source: Source, scratch: Path | None = None) -> Corpus:
    """Read the documents of a located source and split them.

    Args:
        scratch: folder for the tables behind the sequences of local text; None = the cache of `datasets`.

    Raises:
        UserError: no text, bytes that are not UTF-8, a column or split that is not there.
    """
    documents = _read(config, source, scratch)
    stretches: dict[str, list[int]] = {}
    if set(documents) == {"train"}:
        documents = {"": documents["train"]}
    if "" not in documents:
        split, documents = "given", _complete(documents, config.name)
    elif config.source == "builtin":
        names = list(source.files[""])[: len(documents[""])]
        split, documents = "document", _by_document(documents[""], names, BUILTIN_HELD_OUT)
    elif len(documents[""]) >= FEWEST_DOCUMENTS:
        split, documents = "document", _by_document(documents[""], documents[""], HELD_OUT, config.test_pieces or 0)
    elif config.test_pieces is None:
        split, documents = "contiguous", _contiguous(documents[""])
    else:
        split, (documents, stretches) = "stretches", _stretches(documents[""], config.test_pieces)
    documents, shared = _without_copies(documents, split, config.name)
    record = {
        "name": config.name,
        "revision": source.revision,
        "sha256": _digest(part.encode() for s in SPLITS for part in itertools.chain([s], documents[s])),
        "split": split,
        "documents": {s: len(documents[s]) for s in SPLITS},
        "copies": shared,
        **({"stretches": stretches} if stretches else {}),  # of each document in turn, by split
    }
    return Corpus({s: documents[s] for s in SPLITS}, record)


def _local_files(config: DataConfig) -> dict[str, dict[str, Path]]:
    if config.path is None:
        raise UserError("data.path is missing: expected a file, a folder or a glob, such as data.path=novels/")
    found = reading.find(config.path)
    root = Path(config.path).expanduser()
    if not root.is_dir():  # one file, or a glob
        root = found[0].parent
    splits = {"": found} if len(found) == 1 else reading.by_split(found, root) or {"": found}
    return {
        split: {path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path): path for path in paths}
        for split, paths in splits.items()
    }


def _read(config: DataConfig, source: Source, scratch: Path | None) -> dict[str, Sequence[str]]:
    if not source.files:
        assert config.dataset is not None and source.revision is not None
        rows = hub.Rows(config.dataset, config.subset, source.revision, config.column)
        return {
            ours: hub.load(rows, theirs, config.articles, config.max_documents, scratch)
            for ours, theirs in (config.splits or hub.own_splits(rows)).items()
        }
    return {
        split: hub.from_generator(
            reading.read,
            scratch,
            files=tuple(str(path) for path in paths.values()),
            column=config.column,
            articles=config.articles,
            limit=config.max_documents,
            digest=source.digest,
        )
        for split, paths in source.files.items()
    }


def _complete(given: dict[str, Sequence[str]], name: str) -> dict[str, Sequence[str]]:
    """Halve the given held-out split if the other is missing."""
    if len(given) == 3:
        return given
    (there,) = set(given) - {"train"}
    (missing,) = set(SPLITS) - set(given)
    logger.info("data '%s' has no %s split: it gets one half of %s", name, missing, there)
    validation, test = _halves(given[there])
    return {"train": given["train"], "validation": validation, "test": test}


def _halves(texts: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    if len(texts) < FEWEST_DOCUMENTS:
        return [text[: len(text) // 2] for text in texts], [text[len(text) // 2 :] for text in texts]
    first, second = _parts(texts, (0.5,))
    return _select(texts, first), _select(texts, second)


def _by_document(
    texts: Sequence[str], keys: Iterable[str], shares: tuple[float, float], test_pieces: int = 0
) -> dict[str, Sequence[str]]:
    """Give the documents whose keys hash lowest to validation, the next ones to test, the others to training.

    Args:
        test_pieces: test documents that are wanted; more than their share only while training keeps `TRAINING`.
    """
    validation, test, train = _parts(keys, (shares[0], sum(shares)))
    if len(test) < test_pieces:
        moved = _affordable(texts, train, test_pieces - len(test))
        test, train = [*test, *train[:moved]], train[moved:]
    return {"train": _select(texts, train), "validation": _select(texts, validation), "test": _select(texts, test)}


def _affordable(texts: Sequence[str], train: list[int], wanted: int) -> int:
    """How many of the first training documents can be held out as well; equal ones stay together."""
    sizes = [len(text) for text in texts]
    left, least = sum(sizes[i] for i in train), TRAINING * sum(sizes)
    moved = 0
    while moved < wanted:
        end = moved + 1
        while end < len(train) and texts[train[end]] == texts[train[moved]]:
            end += 1
        left -= sum(sizes[i] for i in train[moved:end])
        if left < least or end == len(train):
            break
        moved = end
    return moved


def _parts(keys: Iterable[str], cuts: tuple[float, ...]) -> list[list[int]]:
    """Order documents by the hash of their keys and cut at these shares, never between equal keys."""
    digests = [hashlib.sha256(key.encode()).digest() for key in keys]
    order = sorted(range(len(digests)), key=digests.__getitem__)
    ends = [0]
    for cut in cuts:
        end = max(ends[-1] + 1, round(cut * len(order)))
        while end < len(order) and digests[order[end]] == digests[order[end - 1]]:
            end += 1
        ends.append(end)
    return [order[a:b] for a, b in itertools.pairwise([*ends, len(order)])]


def _select(texts: Sequence[str], indices: Iterable[int]) -> Sequence[str]:
    """The texts at these indices, in their own order; a view where they are a memory-mapped column."""
    return texts.source.select(sorted(indices))["text"]  # type: ignore[attr-defined, no-any-return]


def _contiguous(texts: Sequence[str]) -> dict[str, Sequence[str]]:
    """Cut each text at 90 % and 95 % of its characters."""
    pieces: dict[str, list[str]] = {split: [] for split in SPLITS}
    for text in texts:
        validation, test = (int(share * len(text)) for share in HELD_OUT)
        a, b = len(text) - validation - test, len(text) - test
        for split, piece in zip(SPLITS, (text[:a], text[a:b], text[b:]), strict=True):
            pieces[split].append(piece)
    return dict(pieces)


def _stretches(texts: Sequence[str], wanted: int) -> tuple[dict[str, Sequence[str]], dict[str, list[int]]]:
    """Hold out separate stretches of each text, evenly spread; what lies between two holes is a training document.

    Each text is cut into equal parts. In the middle of a part stands a hole: a validation stretch, then a test stretch.
    All texts give the same share of their characters: 5 % for validation, and for test so much that stretches have
    `STRETCH` characters, but 5 % at least and 25 % at most. A text too short for stretches of that size gets fewer of
    them. Below `FEWEST_STRETCHES` in all they get shorter instead.

    Args:
        wanted: test stretches of all texts together, rounded up to the same number for each.

    Returns:
        The pieces by split, and how many of the pieces of validation and test are of each text.
    """
    of_validation = HELD_OUT[0]
    share = min(max(HELD_OUT[1], wanted * STRETCH / sum(map(len, texts))), 1 - TRAINING - of_validation)
    most, fewest = (-(-number // len(texts)) for number in (wanted, min(wanted, FEWEST_STRETCHES)))
    pieces: dict[str, list[str]] = {split: [] for split in SPLITS}
    counts: dict[str, list[int]] = {split: [] for split in SPLITS[1:]}
    for text in texts:
        holes = min(most, max(fewest, int(share * len(text) / STRETCH)))
        validation, test = (int(part * len(text) / holes) for part in (of_validation, share))
        end = 0
        for i in range(holes):
            start = (2 * i + 1) * len(text) // (2 * holes) - (validation + test) // 2
            pieces["train"].append(text[end:start])
            end = start + validation + test
            pieces["validation"].append(text[start : start + validation])
            pieces["test"].append(text[start + validation : end])
        pieces["train"].append(text[end:])
        for own in counts.values():
            own.append(holes)
    return dict(pieces), counts


def _without_copies(
    documents: dict[str, Sequence[str]], split: str, name: str
) -> tuple[dict[str, Sequence[str]], dict[str, Any]]:
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
        documents = {**documents, "train": _select(train, set(range(len(train))).difference(dropped))}
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
