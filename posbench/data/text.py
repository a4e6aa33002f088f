"""Text in three splits, from the standard library, from files, or from the HuggingFace hub. How it is split:

- `given`: by the source. If validation or test is missing, the other one is halved.
- `document`: whole documents are held out. Training documents that share a passage with them are dropped.
- `stretches`, under 20 documents: separate stretches of each one's text, `data.test_pieces` in all.
"""

import array
import functools
import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from posbench import files
from posbench.config.schema import DataConfig
from posbench.data import paths, readers
from posbench.errors import UserError

SPLITS = ("train", "validation", "test")
HELD_OUT, BUILTIN_HELD_OUT = (0.05, 0.05), (0.06, 0.20)  # shares of validation and test
FEWEST_DOCUMENTS = 20  # to split by document
TRAINING = 0.70  # of the characters at least, as far as `data.test_pieces` decides
STRETCH = 2**13  # characters that a held-out stretch should have: some 2,000 tokens of context before its targets
FEWEST_STRETCHES = 8  # of a short text: fewer would give no interval, so they are shorter instead
PASSAGE_WORDS = 64  # in a row, or a whole document of fewer: what training and held-out text must not share
LARGE, EVERY = 50_000_000, 16  # characters from which every 16th passage is looked for: copies of 79 words are found
ARTICLE_HEADING = re.compile(r" = (?!=).*(?<!=) = ?")  # ` = Title = `, with exactly one pair, begins a WikiText article
_FACTORS = np.random.default_rng(0).integers(2**64, size=PASSAGE_WORDS, dtype=np.uint64) | np.uint64(1)

Parts = list[tuple[int, int, int]]  # (document, first character, end)


class Source(NamedTuple):
    """Which text a configuration means: the hub's commit, a digest, and how to read its documents by split."""

    revision: str | None
    digest: str  # over the names and bytes of its files, or the hub's names and commit
    read: Callable[[], dict[str, Iterable[str]]]  # the only split is "" where none is given


class Texts(Sequence[str]):
    """Documents of a memory-mapped file, each read when it is asked for; their `sizes` are in characters."""

    def __init__(self, data: np.ndarray, spans: np.ndarray) -> None:
        self._data, self._spans, self.sizes = data, spans, spans[:, 2]  # (n, 3): first byte, end, characters

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: Any) -> Any:
        first, end, _ = self._spans[index]
        return self._data[first:end].tobytes().decode()

    def select(self, which: np.ndarray) -> "Texts":
        """Return some of them by number, in order."""
        return Texts(self._data, self._spans[np.sort(which)])


def locate(config: DataConfig) -> Source:
    """Find the text without reading it, and without importing `datasets`."""
    if not {*config.splits} <= {*SPLITS}:
        raise UserError(f"data.splits names {', '.join(config.splits)}: expected train, validation and test")
    if config.source == "hub" and paths.folder_of(config) is None:
        from posbench.data import hub

        commit = hub.resolve(config)
        digest = _digest(str(part).encode() for part in (config.dataset, config.subset, commit))
        return Source(commit, digest, lambda: hub.texts(config, commit))
    by_split = {"": paths.builtin_modules()} if config.source == "builtin" else paths.local_files(config)
    each = [(split, name, path) for split, names in by_split.items() for name, path in names.items()]
    digest = _digest(part for s, name, path in each for part in (s.encode(), os.fsencode(name), files.sha256(path)))
    return Source(None, digest, lambda: {s: readers.read_all(f.values(), config.column) for s, f in by_split.items()})


def documents(config: DataConfig, source: Source) -> dict[str, Iterable[str]]:
    """Return the documents of each split that a source has, without blank ones."""
    joined = {split: join_articles(texts) if config.articles else texts for split, texts in source.read().items()}
    return {split: itertools.islice(filter(str.strip, t), config.max_documents) for split, t in joined.items()}


def join_articles(texts: Iterable[str]) -> Iterable[str]:
    """Join WikiText, given line by line or whole, to articles: a first-level heading after a blank line begins one."""
    article, blank = [""], True
    for line in itertools.chain.from_iterable(text.removesuffix("\n").split("\n") for text in texts):
        line = line.removesuffix("\r")
        if blank and ARTICLE_HEADING.fullmatch(line):
            yield "".join(article)
            article = []
        article.append(line + "\n")
        blank = not line.strip()
    yield "".join(article)


def load(config: DataConfig, source: Source, folder: Path) -> tuple[dict[str, Texts], dict[str, Any]]:
    """Read the documents of a located source into files of a folder; return them by split, and what is recorded."""
    splits = {split: _write(folder / f"{split}.documents", each) for split, each in documents(config, source).items()}
    record: dict[str, Any] = {"name": config.name, "revision": source.revision, "split": "document"}
    texts = next(iter(splits.values()))
    if len(splits) > 1:
        record["split"], splits = "given", _completed(splits, folder)
    elif config.source == "builtin":
        splits = _by_document(texts, list(paths.builtin_modules())[: len(texts)], BUILTIN_HELD_OUT)
    elif len(texts) >= FEWEST_DOCUMENTS:
        splits = _by_document(texts, texts, HELD_OUT, config.test_pieces or 0)
    else:
        parts, counts = _stretches(texts.sizes.tolist(), config.test_pieces or FEWEST_STRETCHES)
        splits = {split: _cut(texts, parts[split], folder / f"{split}.parts.documents") for split in SPLITS}
        record |= {"split": "stretches", "stretches": dict.fromkeys(SPLITS[1:], counts)}  # of each document in turn
    train, every = splits["train"], EVERY if sum(texts.sizes.sum() for texts in splits.values()) > LARGE else 1
    copied, shared = copies(train, itertools.chain(splits["validation"], splits["test"]), every)
    dropped = copied if record["split"] == "document" else []
    splits["train"] = train.select(np.setdiff1d(np.arange(len(train)), dropped))
    if not all(map(len, splits.values())):
        why = f"documents are equal or share {PASSAGE_WORDS} words, as a licence in each"
        raise UserError(f"data '{config.name}': a split is empty, since {why}: take that out, or give splits")
    share = round(float(train.sizes[dropped].sum() / train.sizes.sum()), 6)
    record["copies"] = {"passage_words": PASSAGE_WORDS, "every": every, "shared": round(shared, 6)}
    record["copies"] |= {"dropped_documents": len(dropped), "dropped_text": share}
    record["sha256"] = _digest(part for split in SPLITS for part in (split.encode(), *map(str.encode, splits[split])))
    return splits, record | {"documents": {split: len(splits[split]) for split in SPLITS}}


def _write(path: Path, texts: Iterable[str]) -> Texts:
    """Write documents into a file, one after another, and map it."""
    sizes = array.array("q")
    with path.open("xb") as file:
        for text in texts:
            sizes.extend((file.write(text.encode()), len(text)))
        file.write(b"\n")  # a file of no bytes cannot be mapped
    if not sizes:
        raise UserError("no text: 0 documents that are not blank")
    n_bytes, characters = np.array(sizes, np.int64).reshape(-1, 2).T
    ends = n_bytes.cumsum()
    return Texts(np.memmap(path, np.uint8, "r"), np.stack([ends - n_bytes, ends, characters], 1))


def _cut(texts: Texts, parts: Parts, path: Path) -> Texts:
    whole = functools.lru_cache(1)(texts.__getitem__)
    return _write(path, (whole(number)[first:end] for number, first, end in parts))


def _completed(given: dict[str, Texts], folder: Path) -> dict[str, Texts]:
    """Halve the given held-out split if the other is missing."""
    if len(given) == len(SPLITS):
        return given
    (texts,) = (texts for split, texts in given.items() if split != "train")
    if len(texts) >= FEWEST_DOCUMENTS:
        return _by_document(texts, texts, (0.5, 0.5)) | {"train": given["train"]}
    middles = [(i, size // 2, size) for i, size in enumerate(texts.sizes.tolist())]
    parts = {"validation": [(i, 0, half) for i, half, _ in middles], "test": middles}
    halves = {split: _cut(texts, parts[split], folder / f"{split}.half.documents") for split in SPLITS[1:]}
    return {"train": given["train"]} | halves


def _by_document(texts: Texts, names: Iterable[str], shares: Sequence[float], wanted: int = 0) -> dict[str, Texts]:
    """Give documents to validation, test and training in the order of their names' sha256, equal ones together.

    The test part grows beyond its share to `wanted` documents while training keeps `TRAINING` of the characters.
    """
    keys = np.array([hashlib.sha256(name.encode()).digest() for name in names], "S32")
    _, group, counts = np.unique(keys, return_inverse=True, return_counts=True)
    order, ends, sizes, n = np.argsort(group, kind="stable"), counts.cumsum(), texts.sizes, len(keys)
    spare = ends[sizes.sum() - sizes[order].cumsum()[ends - 1] >= TRAINING * sizes.sum()].max(initial=0)
    validation = ends[ends >= max(1, round(shares[0] * n))][0]
    test = ends[ends >= min(n, max(validation + 1, round(sum(shares) * n)))][0]
    test = max(test, min(spare, ends[ends >= min(n, validation + wanted)][0]))
    parts = order[test:], order[:validation], order[validation:test]
    return dict(zip(SPLITS, map(texts.select, parts), strict=True))


def _stretches(sizes: Sequence[int], wanted: int) -> tuple[dict[str, Parts], list[int]]:
    """Return parts of texts by split, and the number of held-out stretches of each text.

    A text is cut into equal parts. In the middle of each stands a hole: a validation stretch, then a test stretch; what
    lies between two holes is a training document. All texts give the same share of their characters: 5 % for
    validation, and for test so much that `wanted` stretches have `STRETCH` characters, but 5 % to 25 %. A shorter text
    gets fewer of them, and below `FEWEST_STRETCHES` in all they get shorter instead.
    """
    share = min(max(HELD_OUT[1], wanted * STRETCH / sum(sizes)), 1 - TRAINING - HELD_OUT[0])
    most, fewest = (-(-number // len(sizes)) for number in (wanted, min(wanted, FEWEST_STRETCHES)))
    counts = [min(most, max(fewest, int(share * size / STRETCH))) for size in sizes]
    parts: dict[str, Parts] = {split: [] for split in SPLITS}
    for text, (size, holes) in enumerate(zip(sizes, counts, strict=True)):
        validation, test = int(HELD_OUT[0] * size / holes), int(share * size / holes)
        end = 0
        for i in range(holes):
            start = (2 * i + 1) * size // (2 * holes) - (validation + test) // 2
            parts["train"].append((text, end, start))
            end = start + validation + test
            parts["validation"].append((text, start, start + validation))
            parts["test"].append((text, start + validation, end))
        parts["train"].append((text, end, size))
    return parts, counts


def copies(train: Iterable[str], held_out: Iterable[str], every: int = 1) -> tuple[list[int], float]:
    """Return the numbers of training documents that hold every so-manieth held-out passage, and how many these are.

    The second is a share of those passages. A copy that is longer than a passage by `every` - 1 words is always found.
    """
    known = {passage for text in held_out for passage in _passages(text)[::every].data}
    copied = {i: hits for i, text in enumerate(train) if (hits := known.intersection(_passages(text).data))}
    return list(copied), len(set().union(*copied.values())) / max(1, len(known))


def _passages(text: str) -> np.ndarray:
    """The hash of each passage of a text; words are what white space parts."""
    words = np.fromiter((hash(word[0]) for word in re.finditer(r"\S+", text)), np.int64).view(np.uint64)
    padded = np.pad(words, (0, max(0, PASSAGE_WORDS - len(words))))
    return np.correlate(padded, _FACTORS, "valid")[: len(words)]


def _digest(parts: Iterable[bytes]) -> str:
    """sha256 over parts, each preceded by its length, so that no two lists of parts agree by accident."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
