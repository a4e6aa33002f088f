"""Text in three splits, from the standard library, from files, or from the HuggingFace
hub.

A document is a file of prose or code, or a row of a table. Text must be valid UTF-8 and
is not changed. Splits:

- `given`: the source has splits. If validation or test is missing, the other one is
  halved.
- `document`: whole documents are held out. Training documents that share a passage with
  them are dropped.
- `stretches`: with under 20 documents, separate stretches of each one are held out,
  `data.test_pieces` in all.
"""

import array
import csv
import functools
import glob
import hashlib
import io
import itertools
import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from pyarrow import parquet

from posbench import files
from posbench.config.schema import DataConfig
from posbench.data import hub
from posbench.errors import UserError, did_you_mean

SPLITS = ("train", "validation", "test")
HELD_OUT, BUILTIN_HELD_OUT = (0.05, 0.05), (0.06, 0.20)  # shares of validation and test
FEWEST_DOCUMENTS = 20  # needed to split by document
# the share of the characters that `data.test_pieces` leaves for training at least
TRAINING = 0.70
# characters that a held-out stretch should have: some 2,000 tokens of context before
# its targets
STRETCH = 2**13
# in a short text they become shorter, not fewer: fewer would give no interval
FEWEST_STRETCHES = 8
# training and held-out text must not share so many in a row, or a whole shorter
# document
PASSAGE_WORDS = 64
# with more characters only every 16th passage is sought, which finds copies of 79 words
LARGE, EVERY = 50_000_000, 16
# ` = Title = `, with exactly one pair, begins a WikiText article
ARTICLE_HEADING = re.compile(r" = (?!=).*(?<!=) = ?")
_FACTORS = np.random.default_rng(0).integers(
    2**64, size=PASSAGE_WORDS, dtype=np.uint64
) | np.uint64(1)

# The hub's commit, a digest of names and of files' bytes or the commit, and what reads
# the documents by split.
Source = tuple[str | None, str, Callable[[], dict[str, Iterable[str]]]]
PACKED = (".gz", ".zst", ".bz2")
WHOLE = (".txt", ".md", ".py", ".rst", ".tex")  # each file is a document
# Of a folder only the first of these groups that it has is read: reports and settings
# may lie beside data.
KINDS = ((".txt", ".jsonl", ".parquet"), (".csv", ".tsv", ".arrow"), WHOLE, (".json",))
READABLE = tuple(dict.fromkeys(sum(KINDS, ())))
_WORDS = ("train training", "validation valid val dev", "test testing eval evaluation")
SPLIT_WORDS = {
    word: split
    for split, words in zip(SPLITS, _WORDS, strict=True)
    for word in words.split()
}


class Texts(Sequence[str]):
    """Parts of documents. Each is read when it is asked for; `sizes` are in characters."""

    def __init__(self, document: Callable[[int], str], parts: Any) -> None:
        # (n, 3): number of the document, first character, end
        self.document, self.parts = document, np.array(parts)
        self.sizes = self.parts[:, 2] - self.parts[:, 1]

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: Any) -> Any:
        number, first, end = self.parts[index].tolist()
        return self.document(number)[first:end]


def locate(config: DataConfig) -> Source:
    """Find the text without reading it, and without importing `datasets`."""
    if config.source == "hub":
        commit = hub.resolve(config)
        digest = _digest(
            str(part).encode() for part in (config.dataset, config.subset, commit)
        )
        return commit, digest, lambda: _of_hub(config, commit)
    by_split = (
        {"": builtin_modules()} if config.source == "builtin" else local_files(config)
    )
    named = [
        (split, name, path)
        for split, names in by_split.items()
        for name, path in names.items()
    ]
    digest = _digest(
        part
        for s, name, path in named
        for part in (s.encode(), os.fsencode(name), files.sha256(path))
    )
    return (
        None,
        digest,
        lambda: {
            s: read_all(paths.values(), config.column) for s, paths in by_split.items()
        },
    )


def _of_hub(config: DataConfig, commit: str) -> dict[str, Iterable[str]]:
    """Return the documents of a data set by split, under posbench's names. A single
    split is training text.
    """

    def cells(rows: Any) -> Iterator[str]:
        with hub.one_line(config.dataset):
            refuse_missing(config.column, [*(rows.features or [config.column])])
            yield from (
                cell_text(value, config.column) for value in rows[config.column]
            )

    rows = hub.rows(config, commit)
    standard = {
        SPLIT_WORDS[name.lower()]: name
        for name in reversed([*rows])
        if name.lower() in SPLIT_WORDS
    }
    splits = config.splits or (
        standard if len(rows) > 1 else {"train": next(iter(rows))}
    )
    if (
        "train" not in splits
        or not {*splits} <= {*SPLITS}
        or not {*splits.values()} <= {*rows}
    ):
        raise UserError(
            f"'{config.dataset}' has the splits {', '.join(rows)}: give"
            " data.splits={train: NAME}"
        )
    return {split: cells(rows[name]) for split, name in splits.items()}


def join_articles(texts: Iterable[str]) -> Iterable[str]:
    """Join WikiText, given in lines or whole, into articles. A top-level heading after
    a blank line begins one.
    """
    article, blank = [""], True
    for line in (
        line
        for text in texts
        for line in re.split("\r?\n", text.removesuffix("\n").removesuffix("\r"))
    ):
        if blank and ARTICLE_HEADING.fullmatch(line):
            yield "".join(article)
            article = []
        article.append(line + "\n")
        blank = not line.strip()
    yield "".join(article)


def load(
    config: DataConfig, source: Source, folder: Path
) -> tuple[dict[str, Texts], dict[str, Any]]:
    """Read the documents of a located source into files of a folder. Return them by
    split, and their record.
    """
    splits = {}
    for split, documents in source[2]().items():
        not_blank = filter(
            str.strip, join_articles(documents) if config.articles else documents
        )
        splits[split] = _write(
            folder / f"{split}.documents",
            itertools.islice(not_blank, config.max_documents),
        )
    texts, kind, counts = next(iter(splits.values())), "document", {}
    if len(splits) > 1:
        kind, splits = (
            "given",
            splits if len(splits) == len(SPLITS) else _three_splits(splits),
        )
    elif config.source == "builtin":
        splits = _by_document(
            texts,
            list(builtin_modules())[: len(texts)],
            BUILTIN_HELD_OUT,
            config.test_pieces or 0,
        )
    elif len(texts) >= FEWEST_DOCUMENTS:
        splits = _by_document(texts, texts, HELD_OUT, config.test_pieces or 0)
    else:
        parts, n_stretches = _stretches(
            texts.sizes.tolist(), config.test_pieces or FEWEST_STRETCHES
        )
        kind, splits = (
            "stretches",
            {split: Texts(texts.document, parts[split]) for split in SPLITS},
        )
        # for each document
        counts = {"stretches": dict.fromkeys(SPLITS[1:], n_stretches)}
    train, every = (
        splits["train"],
        EVERY if sum(texts.sizes.sum() for texts in splits.values()) > LARGE else 1,
    )
    copied, shared = copies(
        train, itertools.chain(splits["validation"], splits["test"]), every
    )
    dropped = copied if kind == "document" else []
    splits["train"] = Texts(train.document, np.delete(train.parts, dropped, axis=0))
    if not all(map(len, splits.values())):
        raise UserError(
            f"data '{config.name}': a split is empty: documents share {PASSAGE_WORDS}"
            " words, as a licence"
        )
    copy_facts = {
        "every": every,
        "shared": round(shared, 6),
        "dropped_documents": len(dropped),
    }
    digest = _digest(
        part
        for split in SPLITS
        for part in (split.encode(), *map(str.encode, splits[split]))
    )
    record = {
        "name": config.name,
        "revision": source[0],
        "split": kind,
        "copies": copy_facts,
        "sha256": digest,
    }
    return splits, counts | record | {
        "documents": {split: len(splits[split]) for split in SPLITS}
    }


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
    data, ends = np.memmap(path, np.uint8, "r"), n_bytes.cumsum()
    read = functools.lru_cache(1)(
        lambda number: (
            data[ends[number] - n_bytes[number] : ends[number]].tobytes().decode()
        )
    )
    return Texts(read, np.stack([np.arange(len(ends)), 0 * ends, characters], 1))


def _three_splits(splits: dict[str, Texts]) -> dict[str, Texts]:
    """Return three splits, made by halving the only held-out split."""
    (texts,) = (texts for split, texts in splits.items() if split != "train")
    if len(texts) >= FEWEST_DOCUMENTS:
        return _by_document(texts, texts, (0.5, 0.5)) | {"train": splits["train"]}
    numbers, starts, ends = texts.parts.T
    halves = {"validation": (starts, ends // 2), "test": (ends // 2, ends)}
    return splits | {
        split: Texts(texts.document, np.stack([numbers, *half], 1))
        for split, half in halves.items()
    }


def _by_document(
    texts: Texts, names: Iterable[str], shares: Sequence[float], fewest: int = 0
) -> dict[str, Texts]:
    """Split documents by the sha256 of their names. Test gets at least `fewest`
    documents if there is room.
    """
    keys, n, sizes = (
        np.array([hashlib.sha256(name.encode()).digest() for name in names]),
        len(texts),
        texts.sizes,
    )
    # equal ones together
    order, ends = (
        keys.argsort(kind="stable"),
        np.unique(keys, return_counts=True)[1].cumsum(),
    )
    spare = ends[
        sizes.sum() - sizes[order].cumsum()[ends - 1] >= TRAINING * sizes.sum()
    ].max(initial=0)
    validation = ends[ends >= max(1, round(shares[0] * n))][0]
    test = max(validation + 1, round(sum(shares) * n), min(spare, validation + fewest))
    test = ends[ends >= min(n, test)][0]
    parts = order[test:], order[:validation], order[validation:test]
    return {
        split: Texts(texts.document, texts.parts[np.sort(part)])
        for split, part in zip(SPLITS, parts, strict=True)
    }


def _stretches(
    sizes: Sequence[int], count: int
) -> tuple[dict[str, list[tuple[int, int, int]]], list[int]]:
    """Return parts of texts by split, and the number of held-out stretches of each
    text.

    A text is cut into equal parts with a hole in the middle: a validation stretch (5 %
    of the text in all) and a test stretch. This has `STRETCH` characters if 5 % to 25 %
    of the text suffice; else stretches are fewer, then shorter.
    """
    share = min(
        max(HELD_OUT[1], count * STRETCH / sum(sizes)), 1 - TRAINING - HELD_OUT[0]
    )
    most, fewest = (
        -(-number // len(sizes)) for number in (count, min(count, FEWEST_STRETCHES))
    )
    counts = [min(most, max(fewest, int(share * size / STRETCH))) for size in sizes]
    # as in Texts
    parts: dict[str, list[tuple[int, int, int]]] = {split: [] for split in SPLITS}
    for text, (size, holes) in enumerate(zip(sizes, counts, strict=True)):
        validation, test = int(HELD_OUT[0] * size / holes), int(share * size / holes)
        starts = [
            (2 * i + 1) * size // (2 * holes) - (validation + test) // 2
            for i in range(holes)
        ]
        borders = [
            border
            for start in starts
            for border in (start, start + validation, start + validation + test)
        ]
        for split, (first, end) in zip(
            itertools.cycle(SPLITS),
            itertools.pairwise([0, *borders, size]),
            strict=False,
        ):
            parts[split].append((text, first, end))
    return parts, counts


def copies(
    train: Iterable[str], held_out: Iterable[str], every: int = 1
) -> tuple[list[int], float]:
    """Seek each n-th held-out passage. Return the numbers of training documents that
    have one, and the share found.
    """

    def passages(text: str) -> np.ndarray:
        words = np.fromiter(
            (hash(word[0]) for word in re.finditer(r"\S+", text)), np.int64
        ).view(np.uint64)
        padded = np.pad(words, (0, max(0, PASSAGE_WORDS - len(words))))
        return np.correlate(padded, _FACTORS, "valid")[: len(words)]  # a hash of each

    passages_held_out = {
        passage for text in held_out for passage in passages(text)[::every].data
    }
    copied = {
        i: hits
        for i, text in enumerate(train)
        if (hits := passages_held_out.intersection(passages(text).data))
    }
    return list(copied), len(set().union(*copied.values())) / max(
        1, len(passages_held_out)
    )


def _digest(parts: Iterable[bytes]) -> str:
    """Return sha256 over parts, each preceded by its length, so that no two lists of
    parts agree by accident.
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def kind(path: Path) -> str:
    """Return `.csv` for `a.csv` and `a.csv.gz`."""
    return Path(
        path.stem if path.suffix.lower() in PACKED else path.name
    ).suffix.lower()


def builtin_modules() -> dict[str, Path]:
    """Return the file of each module of the built-in corpus that the running Python
    has, in alphabetical order.
    """
    names = re.sub(
        "#.*", "", Path(__file__).with_name("builtin.txt").read_text(encoding="utf-8")
    ).split()
    root = Path(sysconfig.get_path("stdlib"))
    files = (
        (name, root / f"{name.replace('.', '/')}{end}")
        for name in names
        for end in (".py", "/__init__.py")
    )
    return {
        name: file
        for name, file in files
        if file.is_file() and file.read_bytes().strip()
    }


def local_files(config: DataConfig) -> dict[str, dict[str, Path]]:
    """Return the files of text on this machine by split and name. The only split is ""
    if names give none.
    """
    root = Path(os.path.expanduser(str(config.path)))
    # a name may contain the signs of a glob
    literal = glob.escape(str(root)) if root.exists() else str(root)
    names = glob.glob(f"{literal}/**" if root.is_dir() else literal, recursive=True)
    matching = sorted(file for file in map(Path, names) if file.is_file())
    choices = (
        [file for file in matching if kind(file) in kinds]
        for kinds in (KINDS if root.is_dir() else [READABLE])
    )
    if not (files := next(filter(None, choices), [])):
        hint = (
            ""
            if matching
            else did_you_mean(root.name, [file.name for file in root.parent.glob("*")])
        )
        expected = f" (expected {' '.join(READABLE)}, also as {' '.join(PACKED)})"
        raise UserError(f"data.path: no file matches '{config.path}'{hint or expected}")
    root = (
        root
        if root.is_dir()
        else Path(os.path.commonpath([file.parent for file in files]))
    )
    by_name = {file.relative_to(root).as_posix(): file for file in files}
    return {"": by_name} if len(files) == 1 else _by_split(by_name)


def _by_split(files: dict[str, Path]) -> dict[str, dict[str, Path]]:
    """Return files by split, if every path has a word that names one. The first such
    word of a path counts.
    """
    splits: dict[str, dict[str, Path]] = {}
    for name, file in files.items():
        words = re.split(r"[-._ 0-9/]+", name.lower())
        splits.setdefault(
            next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), ""), {}
        )[name] = file
    if (
        0 < 2 * len(strays := splits.get("", {})) < len(files)
        and "train" in splits
        and len(splits) > 2
    ):
        raise UserError(
            f"data.path: '{next(iter(strays))}' names no split, but others do: move it,"
            " or use a glob"
        )
    return {"": files} if strays or "train" not in splits else splits


def read_all(paths: Iterable[Path], column: str) -> Iterator[str]:
    """Yield the documents of files, empty ones included. Raise UserError with file and
    row for what is not text.
    """
    for path in paths:
        number = 1
        try:
            for row in _rows(path, column):
                refuse_missing(column, [*row] if isinstance(row, dict) else [])
                yield cell_text(row[column], column)
                number += 1
        except (ValueError, OSError, RuntimeError, csv.Error) as error:
            reason = str(error).partition("\n")[0]
            if isinstance(error, UnicodeDecodeError):
                reason = (
                    f"not UTF-8 text (byte 0x{error.object[error.start]:02x}): iconv"
                    " converts other encodings"
                )
            raise UserError(
                f"'{path}'{'' if kind(path) in WHOLE else f' row {number}'}: {reason}"
            ) from None


def _rows(path: Path, column: str) -> Iterator[Any]:
    """Yield a file's rows, each a dict by column. Parquet and Arrow come in small
    batches: a row may be a book.
    """
    if kind(path) in (".parquet", ".arrow"):
        file: Any = (
            parquet.ParquetFile(path)
            if kind(path) == ".parquet"
            else pyarrow.ipc.open_stream(path.open("rb"))
        )
        is_stream = kind(path) == ".arrow"  # the format of `datasets`
        refuse_missing(column, (file.schema if is_stream else file.schema_arrow).names)
        for batch in (
            file if is_stream else file.iter_batches(batch_size=64, columns=[column])
        ):
            yield from ({column: cell.as_py()} for cell in batch.column(column))
        return
    # unpacks compressed files
    binary = io.BufferedReader(pyarrow.input_stream(str(path)))
    head = binary.peek(4096)[:4096]
    if max(head[::2].count(0), head[1::2].count(0)) > len(head) / 4:
        raise ValueError(
            "this looks like UTF-16, not UTF-8: iconv -f UTF-16 converts it"
        )
    lines = io.TextIOWrapper(binary, "utf-8-sig", newline="")
    if kind(path) in WHOLE:
        yield {column: lines.read()}
    elif kind(path) == ".json" and head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        yield from json.load(lines)
    elif kind(path) in (".json", ".jsonl"):
        yield from (json.loads(line) for line in lines if line.strip())
    else:
        csv.field_size_limit(2**31 - 1)
        for row in csv.DictReader(
            lines, delimiter="\t" if kind(path) == ".tsv" else ",", strict=True
        ):
            if None in row or None in row.values():
                raise ValueError(
                    "there are not as many cells as columns: quote cells with"
                    " separators"
                )
            yield row


def cell_text(value: Any, column: str) -> str:
    """Return a cell's text, which is empty for null. Raise ValueError for what is not
    text.
    """
    if not isinstance(value, str | None):
        raise ValueError(
            f"column '{column}' holds {type(value).__name__}: expected text"
        )
    (value or "").encode()  # fails for half of a surrogate pair
    return value or ""


def refuse_missing(column: str, columns: Sequence[str]) -> None:
    """Raise ValueError if the column is not there."""
    if column not in columns:
        raise ValueError(
            f"no column '{column}', only"
            f" {', '.join(columns) or 'none'}{did_you_mean(column, columns)}"
        )
