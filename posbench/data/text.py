"""Text in three splits, from the standard library, from files, or from the HuggingFace hub.

In two steps, so that a run on cached tokens pays for the first alone: `locate` says which text is meant, `load` reads
and splits it. Both raise UserError, in one line, for what is wrong with it. How it is split (`record["split"]`):
- `given`: by the source. If validation or test is missing, the other one is halved; training text is left alone.
- `document`: 5 % of the documents each, chosen by the hash of their text, so that equal documents stay together. The
  test part grows to `data.test_pieces` documents while training keeps 70 % of the characters. Of the built-in corpus
  6 % and 20 %, chosen by the hash of module names. Training documents that share a passage with validation or test text
  are dropped.
- `stretches`, under 20 documents: separate stretches of each one's text, `data.test_pieces` in all, see `_stretches`.
"""

import array
import hashlib
import itertools
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from posbench import files
from posbench.config.schema import DataConfig
from posbench.data import paths
from posbench.data.tokenizer import pieces
from posbench.errors import UserError

logger = logging.getLogger(__name__)

SPLITS = ("train", "validation", "test")
DOCUMENTS = "documents"  # the file of all of them, as long as they are read
HELD_OUT = (0.05, 0.05)  # shares of validation and test
# The built-in corpus is small: a larger share, for some fifty test documents of more than a thousand tokens.
BUILTIN_HELD_OUT = (0.06, 0.20)
FEWEST_DOCUMENTS = 20  # to split by document
TRAINING = 0.70  # of the characters at least, as far as `data.test_pieces` decides
STRETCH = 2**13  # characters that a held-out stretch should have: some 2,000 tokens of context before its targets
FEWEST_STRETCHES = 8  # of a short text: fewer would give no interval, so they are shorter instead
PASSAGE_WORDS = 64  # in a row, or a whole document of fewer: what training and held-out text must not share
LARGE, EVERY = 50_000_000, 16  # characters from which every 16th passage is looked for: copies of 79 words are found
MUCH_SHARED, MUCH_DROPPED = 0.01, 0.10  # of held-out passages, of training text: worth a warning
# ` = Title = `, with exactly one pair of equals signs, begins a WikiText article.
ARTICLE_HEADING = re.compile(r" = (?!=).*(?<!=) = ?")
_FACTORS = np.random.default_rng(0).integers(2**64, size=PASSAGE_WORDS, dtype=np.uint64) | np.uint64(1)


class Source(NamedTuple):
    """Which text a configuration means: its files by split ("" = not given), or a commit on the hub."""

    files: dict[str, dict[str, Path]]  # split -> name -> file
    revision: str | None
    digest: str  # over the names and bytes of the files, or the hub's names and commit


class Texts(Sequence[str]):
    """Documents of a memory-mapped file, or pieces of them, each read when it is asked for.

    Attributes:
        spans: (n, 3) int64: first byte, end, number of characters.
        sizes: (n,) int64: number of characters.
    """

    def __init__(self, data: np.ndarray, spans: np.ndarray) -> None:
        self._data, self.spans, self.sizes = data, spans, spans[:, 2]

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: Any) -> Any:
        first, end, _ = self.spans[index]
        return self._data[first:end].tobytes().decode()

    def select(self, which: Any) -> "Texts":
        """Return some of them: an array of their numbers, or a slice."""
        return Texts(self._data, self.spans[which])

    def cut(self, parts: Iterable[tuple[int, int, int]]) -> "Texts":
        """Return parts (document, first character, end); those of one document stand together, in order."""
        spans = []
        for number, of_document in itertools.groupby(parts, key=lambda part: part[0]):
            text, byte, character = self[number], int(self.spans[number, 0]), 0
            for _, first, end in of_document:
                begin = byte + len(text[character:first].encode())
                byte, character = begin + len(text[first:end].encode()), end
                spans.append((begin, byte, end - first))
        return Texts(self._data, np.array(spans, np.int64).reshape(-1, 3))


def write(path: Path, splits: Mapping[str, Iterable[str]]) -> dict[str, Texts]:
    """Write the documents of all splits into a file, one after another, and return those of each."""
    sizes, counts = array.array("q"), [0]
    with path.open("xb") as file:
        for texts in splits.values():
            for text in texts:
                sizes.extend((file.write(text.encode()), len(text)))
            counts.append(len(sizes) // 2)
    n_bytes, characters = np.array(sizes, np.int64).reshape(-1, 2).T
    spans = np.stack([n_bytes.cumsum() - n_bytes, n_bytes.cumsum(), characters], 1)
    data, parts = np.memmap(path, np.uint8, "r"), zip(splits, itertools.pairwise(counts), strict=True)
    return {split: Texts(data, spans[begin:end]) for split, (begin, end) in parts}


def locate(config: DataConfig) -> Source:
    """Find the text without importing `datasets`."""
    if config.source == "hub" and paths.folder_of(config) is None:
        from posbench.data import hub

        commit = hub.resolve(config)
        return Source({}, commit, _digest(str(part).encode() for part in (config.dataset, config.subset, commit)))
    by_split = {"": paths.builtin_modules()} if config.source == "builtin" else paths.local_files(config)
    each = [(split, name, path) for split, names in by_split.items() for name, path in names.items()]
    try:
        parts = [part for s, name, path in each for part in (s.encode(), os.fsencode(name), files.sha256(path))]
    except OSError as error:
        raise UserError(f"data.path: the text {error.filename} cannot be read: {error.strerror}") from None
    return Source(by_split, None, _digest(parts))


def load(config: DataConfig, source: Source, folder: Path) -> tuple[dict[str, Texts], dict[str, Any]]:
    """Read the documents of a located source into a file of a folder; return them by split, and what is recorded."""
    splits = write(folder / DOCUMENTS, documents(config, source))
    record: dict[str, Any] = {"name": config.name, "revision": source.revision, "split": "document"}
    if set(splits) - {"", "train"}:
        record["split"], splits = "given", _completed(splits, config.name)
    elif config.source == "builtin":
        keys = [hashlib.sha256(name.encode()).digest() for name in source.files[""]][: len(splits[""])]
        splits = _by_document(splits[""], np.array(keys, "S32"), BUILTIN_HELD_OUT, 0)
    else:
        (texts,) = splits.values()
        if len(texts) >= FEWEST_DOCUMENTS:
            splits = _by_document(texts, _keys(texts), HELD_OUT, config.test_pieces or 0)
        else:
            parts, counts = _stretches(texts.sizes.tolist(), config.test_pieces or FEWEST_STRETCHES)
            splits = {split: texts.cut(parts[split]) for split in SPLITS}
            record |= {"split": "stretches", "stretches": dict.fromkeys(SPLITS[1:], counts)}  # of each document in turn
    if empty := [split for split in SPLITS if not len(splits[split])]:
        raise UserError(
            f"data '{config.name}': no document is left for {' and '.join(empty)}, since equal ones stay together: "
            "take repeated documents out, or give splits of your own"
        )
    record["copies"] = _leave_copies_out(splits, record["split"] == "document", config.name)
    every = (part for split in SPLITS for part in (split.encode(), *map(str.encode, splits[split])))
    return splits, record | {"sha256": _digest(every), "documents": {split: len(splits[split]) for split in SPLITS}}


def documents(config: DataConfig, source: Source) -> dict[str, Iterator[str]]:
    """Return the documents of each split that a source has, without blank ones."""
    if source.files:
        from posbench.data import readers

        each = {split: readers.read_all(names.values(), config.column) for split, names in source.files.items()}
    else:
        from posbench.data import hub

        each = hub.texts(config, source.revision)
    return {split: _filled(texts, config) for split, texts in each.items()}


def _filled(texts: Iterable[str], config: DataConfig) -> Iterator[str]:
    is_empty = True
    texts = join_articles(texts) if config.articles else texts
    for text in itertools.islice(filter(str.strip, texts), config.max_documents):
        is_empty = False
        yield text
    if is_empty:
        raise UserError(f"no text in '{config.path or config.dataset}': 0 documents that are not blank")


def join_articles(texts: Iterable[str]) -> Iterator[str]:
    """Join WikiText, given line by line or whole, to articles: a first-level heading after a blank line begins one."""
    article: list[str] = []
    blank = True
    for line in itertools.chain.from_iterable(text.removesuffix("\n").split("\n") for text in texts):
        line = line.removesuffix("\r")
        if blank and ARTICLE_HEADING.fullmatch(line) and article:
            yield "".join(article)
            article = []
        article.append(line + "\n")
        blank = not line.strip()
    yield "".join(article)


def _completed(given: dict[str, Texts], name: str) -> dict[str, Texts]:
    """Halve the given held-out split if the other is missing."""
    if len(given) == len(SPLITS):
        return given
    (missing,), (other,) = {*SPLITS} - {*given}, {*given} - {"train"}
    logger.info("data '%s' has no %s split: it gets one half of %s", name, missing, other)
    texts, sizes = given[other], [*enumerate(given[other].sizes.tolist())]
    if len(texts) >= FEWEST_DOCUMENTS:
        halves = [texts.select(np.sort(part)) for part in _parts(_keys(texts), [0.5])]
    else:
        cuts = (((i, 0, size // 2) for i, size in sizes), ((i, size // 2, size) for i, size in sizes))
        halves = [*map(texts.cut, cuts)]
    return {"train": given["train"], "validation": halves[0], "test": halves[1]}


def _keys(texts: Texts) -> np.ndarray:
    """The sha256 of each document: (n,) S32."""
    return np.array([hashlib.sha256(text.encode()).digest() for text in texts], "S32")


def _by_document(texts: Texts, keys: np.ndarray, shares: tuple[float, float], wanted: int) -> dict[str, Texts]:
    """Give the documents with the lowest keys to validation, the next ones to test, the others to training.

    Args:
        wanted: test documents; more than their share only while training keeps `TRAINING`.
    """
    validation, test, train = _parts(keys, [shares[0], sum(shares)])
    left, moved = texts.sizes[train].sum(), 0
    while len(test) + moved < wanted:
        end = moved + 1
        while end < len(train) and keys[train[end]] == keys[train[moved]]:  # equal ones stay together
            end += 1
        left -= texts.sizes[train[moved:end]].sum()
        if left < TRAINING * texts.sizes.sum() or end == len(train):
            break
        moved = end
    parts = (train[moved:], validation, np.concatenate([test, train[:moved]]))
    return {split: texts.select(np.sort(part)) for split, part in zip(SPLITS, parts, strict=True)}


def _parts(keys: np.ndarray, shares: Sequence[float]) -> list[np.ndarray]:
    """Order documents by their keys and cut at these shares, never between equal keys."""
    order, ends = np.argsort(keys, kind="stable"), [0]
    for share in shares:
        end = max(ends[-1] + 1, round(share * len(order)))
        while end < len(order) and keys[order[end]] == keys[order[end - 1]]:
            end += 1
        ends.append(end)
    return [order[a:b] for a, b in itertools.pairwise([*ends, len(order)])]


def _stretches(sizes: Sequence[int], wanted: int) -> tuple[dict[str, list[tuple[int, int, int]]], list[int]]:
    """Hold out separate stretches of each text, evenly spread; what lies between two holes is a training document.

    Each text is cut into equal parts. In the middle of a part stands a hole: a validation stretch, then a test stretch.
    All texts give the same share of their characters: 5 % for validation, and for test so much that stretches have
    `STRETCH` characters, but 5 % at least and 25 % at most. A text too short for stretches of that size gets fewer of
    them. Below `FEWEST_STRETCHES` in all they get shorter instead.

    Args:
        sizes: characters of each text.
        wanted: test stretches of all texts together, rounded up to the same number for each.

    Returns:
        The pieces by split, and how many held-out stretches each text has.
    """
    of_validation = HELD_OUT[0]
    share = min(max(HELD_OUT[1], wanted * STRETCH / sum(sizes)), 1 - TRAINING - of_validation)
    most, fewest = (-(-number // len(sizes)) for number in (wanted, min(wanted, FEWEST_STRETCHES)))
    spans: dict[str, list[tuple[int, int, int]]] = {split: [] for split in SPLITS}
    counts = [min(most, max(fewest, int(share * size / STRETCH))) for size in sizes]
    for number, (size, holes) in enumerate(zip(sizes, counts, strict=True)):
        validation, test = (int(part * size / holes) for part in (of_validation, share))
        end = 0
        for i in range(holes):
            start = (2 * i + 1) * size // (2 * holes) - (validation + test) // 2
            spans["train"].append((number, end, start))
            end = start + validation + test
            spans["validation"].append((number, start, start + validation))
            spans["test"].append((number, start + validation, end))
        spans["train"].append((number, end, size))
    return spans, counts


def _leave_copies_out(splits: dict[str, Texts], drop: bool, name: str) -> dict[str, Any]:
    """Find passages of held-out text in training documents, drop those if so asked, and return what is recorded."""
    train, what = splits["train"], f"passages of {PASSAGE_WORDS} words"
    every = EVERY if sum(texts.sizes.sum() for texts in splits.values()) > LARGE else 1
    copied, shared = copies(train, itertools.chain(splits["validation"], splits["test"]), every)
    text = float(train.sizes[copied].sum() / max(1, train.sizes.sum()))
    if drop and len(copied) == len(train):
        raise UserError(
            f"data '{name}': every training document shares {what} with validation or test text, as a licence in "
            "each would: take it out, or give splits of your own in folders train, validation and test"
        )
    if drop and copied:
        splits["train"] = train.select(np.delete(np.arange(len(train)), copied))
        line = "data '%s': left out %d of %d training documents (%.1f %% of the text) that share %s with held-out text"
        level = logging.WARNING if text > MUCH_DROPPED else logging.INFO
        logger.log(level, line, name, len(copied), len(train), 100 * text, what)
    elif shared > MUCH_SHARED:
        line = "data '%s': %.1f %% of the held-out %s stand in the training text, too"
        logger.warning(line, name, 100 * shared, what)
    record = {"passage_words": PASSAGE_WORDS, "every": every, "shared": round(shared, 6)}
    return record | {"dropped_documents": drop * len(copied), "dropped_text": drop * round(text, 6)}


def copies(train: Iterable[str], held_out: Iterable[str], every: int = 1) -> tuple[list[int], float]:
    """Look in training documents for every so-manieth passage of held-out ones, so that longer copies are all found.

    Returns:
        The numbers of training documents that hold such a passage, and the share of the passages that they hold.
    """
    none = np.zeros(1, np.uint64)  # the hash of nothing, so that there is a last one
    known = np.unique(np.concatenate([none, *(_passages(text)[::every] for text in held_out)]))
    is_copied, numbers = np.zeros(len(known), bool), []
    for number, text in enumerate(train):
        hashes = _passages(text)
        places = np.searchsorted(known[:-1], hashes)
        places = places[known[places] == hashes]
        is_copied[places] = True
        numbers += [number] * (len(places) > 0)
    return numbers, float(is_copied.sum()) / max(1, len(known) - 1)


def _passages(text: str) -> np.ndarray:
    """The hash of each passage of a text; words are what white space parts."""
    hashes, last = [np.zeros(0, np.uint64)], np.zeros(0, np.uint64)
    for piece in pieces(text):
        words = np.concatenate([last, np.array([hash(word) for word in piece.split()], np.int64).view(np.uint64)])
        last = words[1 - PASSAGE_WORDS :]
        if 0 < len(words) < PASSAGE_WORDS:
            words = np.pad(words, (0, PASSAGE_WORDS - len(words)))
        if len(words):
            hashes.append(np.lib.stride_tricks.sliding_window_view(words, PASSAGE_WORDS) @ _FACTORS)
    return np.concatenate(hashes)


def _digest(parts: Iterable[bytes]) -> str:
    """sha256 over parts, each preceded by its length, so that no two lists of parts agree by accident."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
