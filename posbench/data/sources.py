"""Where the documents of a text come from: the standard library, files on this machine,
or the HuggingFace hub.

A document is a file of prose or code, or a row of a table. Text must be valid UTF-8 and
is not changed.
"""

import csv
import dataclasses
import functools
import glob
import hashlib
import io
import json
import logging
import os
import re
import shlex
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import pyarrow
from pyarrow import parquet

from posbench import files
from posbench.config.digest import relative_path
from posbench.config.schema import DataConfig, refused
from posbench.data import hub
from posbench.data.tokenizer import MADE_HERE, file_of
from posbench.errors import UserError, did_you_mean, nearest
from posbench.terminal.console import plural

logger = logging.getLogger(__name__)

PACKED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
# Of a folder only the first of these groups that it has is read: reports and settings
# may lie beside data.
KINDS: tuple[tuple[str, ...], ...] = (
    (".txt", ".jsonl", ".parquet"),
    (".csv", ".tsv"),
    (".md", ".py", ".rst", ".tex"),
    (".json",),
)
READABLE = sum(KINDS, ())
WHOLE = (".txt", *KINDS[2])  # each file is a document
SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
}
# The encodings that a file is thought to be in if it is not UTF-8, and how many of its
# bytes say which. Others of the West differ from cp1252 in few letters.
ENCODINGS = ["cp1252", "cp1251", "cp932", "gb18030", "big5", "euc_kr"]
GUESSED_BYTES = 2**16
# ` = Title = `, with exactly one pair, begins a WikiText article
ARTICLE_HEADING = re.compile(r" = (?!=).*(?<!=) = ?")


@functools.cache
def _sha256(path: Path, n_bytes: int, changed_ns: int) -> bytes:
    """Return the digest of a file of this size and time; a sweep asks for each run."""
    return files.sha256(path)


class NoFile(UserError):
    """There is no file at a text's path."""


class Source(NamedTuple):
    """A text that was found and not yet read."""

    commit: str | None  # of a data set of the hub
    sha256: str  # of files' bytes and kinds, in order, or of the commit
    read: Callable[[], dict[str, Iterable[str]]]  # gives the documents by split


def locate(config: DataConfig) -> Source:
    """Find the text without reading it."""
    if config.source == "hub":
        commit = hub.resolve(config)
        names = [config.dataset, config.subset, commit]
        sha256 = digest(str(name).encode() for name in names)
        return Source(
            commit,
            sha256,
            lambda: _of_rows(config, str(config.dataset), hub.rows(config, commit)),
        )

    if _is_saved(config):
        import datasets

        root = str(config.path)
        with hub.one_line(root):
            loaded = datasets.load_from_disk(root, keep_in_memory=False)
        by_split = loaded
        if isinstance(loaded, datasets.Dataset):
            by_split = {"": loaded}
        # other files beside its own, such as what `map` keeps there, are not read
        parts = []
        for split, rows in by_split.items():
            for file in rows.cache_files:
                parts += [split.encode(), files.sha256(Path(file["filename"]))]
        return Source(None, digest(parts), lambda: _of_rows(config, root, by_split))

    if config.source == "builtin":
        splits = {"": builtin_modules()}
    else:
        splits = local_files(config)

    parts = []
    for split, by_name in splits.items():
        for path in by_name.values():  # in the order of their names
            kind = text_ending(path).encode()
            facts = path.stat()
            content = _sha256(path, facts.st_size, facts.st_mtime_ns)
            parts += [split.encode(), kind, content]

    def read() -> dict[str, Iterable[str]]:
        return {
            split: read_all(by_name.values(), config.column)
            for split, by_name in splits.items()
        }

    return Source(None, digest(parts), read)


def identified(config: DataConfig) -> DataConfig:
    """Return data with the digests of its text and tokenizer, if those are files of the
    user; what is gone keeps the digest that it had. Raises UserError for another text.
    """
    file = file_of(config.tokenizer)
    if config.tokenizer not in MADE_HERE and file.is_file():
        config = dataclasses.replace(
            config, tokenizer_file_sha256=files.sha256(file).hex()
        )
    if config.source != "text" or not config.path:
        return config
    try:
        return dataclasses.replace(config, text_sha256=same_text(config).sha256)
    except NoFile:
        if config.text_sha256:
            return config
        raise


def moved(config: DataConfig, path: str) -> DataConfig:
    """Return a run's data with its text at another path. Raises UserError if another
    text is there, or if the run has no text that can move.
    """
    if config.text_sha256 is None:
        raise UserError(
            f"data.path is {path}: expected a run whose text was files with a digest,"
            f" this one's is {config.path or config.name}"
        )
    config = dataclasses.replace(config, path=relative_path(path))
    same_text(config)
    return config


def same_text(config: DataConfig) -> Source:
    """Find a text, and refuse another one than has the digest that is known."""
    try:
        source = locate(config)
    except NoFile as error:
        if not config.text_sha256:
            raise
        raise NoFile(f"{error}; where it is now: data.path=PATH") from None
    if config.text_sha256 not in (None, source.sha256):
        raise UserError(
            f"data.path: {config.path} is another text than the run's: expected that"
            " text, data.path=WHERE IT IS"
        )
    return source


def digest(parts: Iterable[bytes]) -> str:
    """Return sha256 over parts, each preceded by its length, so that no two lists of
    parts agree by accident.
    """
    sha256 = hashlib.sha256()
    for part in parts:
        sha256.update(len(part).to_bytes(8, "little") + part)
    return sha256.hexdigest()


def _of_rows(config: DataConfig, name: str, rows: Any) -> dict[str, Iterable[str]]:
    """Return the documents of a data set by split, under posbench's names. A single
    split is training text.
    """
    splits = config.splits
    if not splits and len(rows) == 1:
        splits = {"train": next(iter(rows))}
    elif not splits:
        # of two names for one split, such as valid and dev, the first counts
        named = [split for split in rows if split.lower() in SPLIT_WORDS]
        splits = {SPLIT_WORDS[split.lower()]: split for split in reversed(named)}

    known = {*SPLIT_WORDS.values()}
    is_clear = known.issuperset(splits) and {*rows}.issuperset(splits.values())
    if "train" not in splits or not is_clear:
        raise UserError(
            f"'{name}' has the splits {', '.join(rows)}: give"
            " data.splits={train: NAME}"
        )

    unread = [split for split in rows if split not in splits.values()]
    if unread:
        logger.info("'%s': splits that are not read: %s", name, ", ".join(unread))

    def cells(rows: Any) -> Iterator[str]:
        with hub.one_line(name):
            refuse_unclear(config.column, [*(rows.features or [config.column])])
            for value in rows[config.column]:
                yield cell_text(value, config.column)

    return {split: cells(rows[of_rows]) for split, of_rows in splits.items()}


def files_of(config: DataConfig) -> Iterator[tuple[str, Path]]:
    """Yield the files of a user's text, each with its name below the text's folder."""
    if not _is_saved(config):
        for by_name in local_files(config).values():
            yield from by_name.items()
        return
    folder = Path(str(config.path))
    for file in sorted(filter(Path.is_file, folder.rglob("*"))):
        yield file.relative_to(folder).as_posix(), file


def _is_saved(config: DataConfig) -> bool:
    """Return whether a text is a folder that `save_to_disk` of `datasets` wrote."""
    folder = Path(str(config.path))
    of_splits, of_one = folder / "dataset_dict.json", folder / "state.json"
    return bool(config.path) and (of_splits.is_file() or of_one.is_file())


def builtin_modules() -> dict[str, Path]:
    """Return the file of each module of the built-in corpus that the running Python
    has, in alphabetical order.
    """
    listed = Path(__file__).with_name("builtin.txt").read_text(encoding="utf-8")
    root = Path(sysconfig.get_path("stdlib"))
    modules = {}
    for name in re.sub("#.*", "", listed).split():
        for ending in (".py", "/__init__.py"):
            file = root / (name.replace(".", "/") + ending)
            if file.is_file() and file.read_bytes().strip():
                modules[name] = file
    return modules


def local_files(config: DataConfig) -> dict[str, dict[str, Path]]:
    """Return the files of text on this machine by split and name. The only split is ""
    if names give none.
    """
    if not config.path:  # which would be the current folder
        raise refused("data.path", config.path, "a file, a folder or a glob")
    root = Path(config.path)
    if root.exists():  # its name may contain the signs of a glob
        paths = _below(root)
    else:
        paths = map(Path, glob.iglob(str(root), recursive=True))
    matching = _each_once(path for path in paths if path.is_file())

    found: list[Path] = []
    for endings in KINDS if root.is_dir() else [READABLE]:  # a glob may mix them
        if not found:
            found = [path for path in matching if text_ending(path) in endings]
    if not found:
        expected = f" (expected {' '.join(READABLE)}, also as {' '.join(PACKED)})"
        if not matching and not root.exists():
            neighbours = [file.name for file in root.parent.glob("*")]
            expected = did_you_mean(root.name, neighbours) or expected
        raise NoFile(f"data.path: no file matches '{config.path}'{expected}")

    unpacked = dict[Path, Path]()
    for path in found:
        other = unpacked.setdefault(_unpacked(path), path)
        if other != path:
            raise UserError(
                f"data.path: '{other}' and '{path}' are one text by their names: move"
                " one away, or use a glob"
            )

    _log_read(found, matching)
    if not root.is_dir():
        root = Path(os.path.commonpath([file.parent for file in found]))
    by_name = {file.relative_to(root).as_posix(): file for file in found}
    return _by_split(by_name, config.splits)


def _below(path: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Yield a file, or the files below a folder but for hidden names. A link that leads
    back to a folder above is not followed: two of them would have paths without end.
    """
    if not path.is_dir():
        yield path
    elif path.resolve() not in above:
        for inner in path.glob("[!.]*"):
            yield from _below(inner, (*above, path.resolve()))


def _log_read(found: Sequence[Path], matching: Sequence[Path]) -> None:
    """Log how many files of which kinds are read, and how many are left out."""
    if len(matching) == 1:
        return
    left_out = Counter(text_ending(path) or path.name for path in matching)
    left_out -= Counter(text_ending(path) or path.name for path in found)
    text = f"{plural(len(found), 'file')} read"
    if left_out:
        counts = [f"{count} {ending}" for ending, count in left_out.items()]
        kinds = " ".join(sorted({text_ending(path) for path in found}))
        text += (
            f", {kinds}; left out: {', '.join(counts)} (of a folder one kind of files"
            " is read; a glob takes others)"
        )
    logger.info("data.path: %s", text)


def _each_once(paths: Iterable[Path]) -> list[Path]:
    """Return files in order. Of several paths that links lead to one file by, the
    shortest is its name.
    """
    by_place = dict[Path, Path]()
    for path in sorted(paths, key=lambda path: (len(path.parts), path)):
        by_place.setdefault(path.resolve(), path)
    return sorted(by_place.values())


def _unpacked(path: Path) -> Path:
    return path.with_suffix("") if path.suffix.lower() in PACKED else path


def text_ending(path: Path) -> str:
    """Return `.csv` for `a.csv` and `a.csv.gz`."""
    return _unpacked(path).suffix.lower()


def _by_split(
    paths: dict[str, Path], setting: dict[str, str]
) -> dict[str, dict[str, Path]]:
    """Return files by split, if every path has a word that names one. The first such
    word of a path counts; a setting of splits is refused.
    """
    if setting:
        expected = "{}, since names of files say their splits, such as train.txt"
        raise refused("data.splits", setting, expected)
    splits: dict[str, dict[str, Path]] = {}
    for name, path in paths.items():
        words = re.split(r"[-._ 0-9/]+", name.lower())
        named = [SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS]
        split = named[0] if named else ""
        splits.setdefault(split, {})[name] = path

    if "train" not in splits:
        return {"": paths}
    strays = splits.get("", {})
    if strays and len(splits) > 2 and 2 * len(strays) < len(paths):
        raise UserError(
            f"data.path: '{next(iter(strays))}' names no split, but others do: move it,"
            " or use a glob"
        )
    return {"": paths} if strays else splits


def read_all(paths: Iterable[Path], column: str) -> Iterator[str]:
    """Yield the documents of files, empty ones included. Raise UserError with file and
    row for what is not text.
    """
    for path in paths:
        number = 1
        try:
            for row in _rows(path, column):
                if not isinstance(row, dict):
                    found = type(row).__name__
                    raise ValueError(f"found {found}: expected an object with columns")
                refuse_unclear(column, [*row])
                yield cell_text(row[column], column)
                number += 1
        except (ValueError, OSError, RecursionError, csv.Error) as error:
            is_table = text_ending(path) == ".parquet"
            if isinstance(error, UnicodeDecodeError) and not is_table:
                raise _not_utf8(path) from None
            reason = str(error).partition("\n")[0]
            if isinstance(error, json.JSONDecodeError):
                reason += ": expected an object a line, or one array of objects"
            place = "" if text_ending(path) in WHOLE else f" row {number}"
            raise UserError(f"'{path}'{place}: {reason}") from None


def _not_utf8(path: Path) -> UserError:
    """Return the error about a file in another encoding, with its likely name and the
    command that converts it.
    """
    import charset_normalizer

    with pyarrow.input_stream(str(path), PACKED.get(path.suffix.lower())) as file:
        beginning = file.read(GUESSED_BYTES)
    guess = charset_normalizer.from_bytes(beginning, cp_isolation=ENCODINGS).best()
    likely = ""
    name = "ENCODING"
    if guess:
        likely = f", but probably {guess.encoding}"
        name = guess.encoding.upper()
    new = f"converted{text_ending(path)}"
    unpacked = _unpacked(path)
    before = "" if unpacked == path else "unpack it, "
    return UserError(
        f"'{path}' is not UTF-8{likely}: {before}convert it by 'iconv -f {name}"
        f" -t UTF-8 {shlex.quote(str(unpacked))} > {new}', and move it away"
    )


def _rows(path: Path, column: str) -> Iterator[Any]:
    """Yield a file's rows, each a dict by column."""
    ending = text_ending(path)
    if ending == ".parquet":
        file = parquet.ParquetFile(path)
        refuse_unclear(column, file.schema_arrow.names)
        # in small batches, since a row may be a book
        for batch in file.iter_batches(batch_size=64, columns=[column]):
            yield from batch.to_pylist()
        return

    packed = PACKED.get(path.suffix.lower())
    binary = io.BufferedReader(pyarrow.input_stream(str(path), packed))
    head = binary.peek(4096)[:4096]
    # UTF-16 would pass: its ASCII is valid UTF-8, with zeros between
    zeros = max(head[::2].count(0), head[1::2].count(0))
    if zeros > len(head) / 4:
        raise ValueError(
            "this looks like UTF-16, not UTF-8: iconv -f UTF-16 converts it"
        )
    head = head.lstrip(b"\xef\xbb\xbf \t\r\n")

    lines = io.TextIOWrapper(binary, "utf-8-sig", newline="")
    if ending in WHOLE:
        yield {column: lines.read()}
    elif ending in (".json", ".jsonl"):
        yield from _objects(lines, head.startswith(b"["), column)
    else:
        csv.field_size_limit(2**31 - 1)
        delimiter = "\t" if ending == ".tsv" else ","
        table = csv.DictReader(lines, delimiter=delimiter, strict=True)
        refuse_unclear(column, table.fieldnames or [])
        for row in table:
            if None in row or None in row.values():
                raise ValueError(
                    "there are not as many cells as columns: quote cells with"
                    " separators"
                )
            yield row


def _objects(lines: TextIO, is_array: bool, column: str) -> Iterator[Any]:
    """Yield the objects of one JSON array, or of one JSON value a line."""

    def row_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        refuse_double(column, [name for name, _ in pairs])
        return dict(pairs)

    if is_array:
        yield from json.load(lines, object_pairs_hook=row_of)
        return
    for line in lines:
        if line.strip():
            yield json.loads(line, object_pairs_hook=row_of)


def cell_text(value: Any, column: str) -> str:
    """Return a cell's text, which is empty for null. Raise ValueError for what is not
    text.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        found = type(value).__name__
        raise ValueError(f"column '{column}' holds {found}: expected text")
    value.encode()  # fails for half of a surrogate pair
    return value


def refuse_double(column: str, columns: Sequence[str]) -> None:
    """Raise ValueError if the column is there more than once."""
    if columns.count(column) > 1:
        raise ValueError(f"there are {columns.count(column)} columns '{column}'")


def refuse_unclear(column: str, columns: Sequence[str]) -> None:
    """Raise ValueError if the column is not there, or more than once."""
    refuse_double(column, columns)
    if column not in columns:
        names = ", ".join(columns)[:200] or "none"
        cure = f"data.column={nearest(column, columns) or 'NAME'}"
        raise ValueError(f"no column '{column}', only {names}: give {cure}")


def join_articles(texts: Iterable[str]) -> Iterator[str]:
    """Join WikiText, given in lines or whole, into articles. A top-level heading after
    a blank line begins one.
    """
    article = [""]
    is_after_blank = True
    for text in texts:
        text = text.removesuffix("\n").removesuffix("\r")
        for line in re.split("\r?\n", text):
            if is_after_blank and ARTICLE_HEADING.fullmatch(line):
                yield "".join(article)
                article = []
            article.append(line + "\n")
            is_after_blank = not line.strip()
    yield "".join(article)
