"""Documents from files on this machine: which files, which split each belongs to, and their text.

Prose and code (`.txt`, `.md`, `.py` ...) hold one document per file, tables (`.jsonl`, `.parquet`, `.csv` ...) one per
row; all that is text may be packed (`.gz`, `.zst`, `.bz2`). It is read as strict UTF-8; line ends stay as they are; a
byte-order mark is dropped, being no text. A folder may be one that `datasets` saved with save_to_disk.
"""

import bz2
import codecs
import contextlib
import dataclasses
import fnmatch
import glob
import gzip
import io
import itertools
import json
import logging
import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from posbench.data import bounds
from posbench.errors import UserError, did_you_mean

logger = logging.getLogger(__name__)

PACKED = (".gz", ".zst", ".bz2")
WHOLE = (".txt", ".md", ".py", ".rst", ".tex")  # a document each
# What a folder's text is: the files of the first of these kinds that it has. Reports and settings lie beside data.
KINDS = ((".txt", ".jsonl", ".parquet"), (".csv", ".tsv", ".arrow"), WHOLE, (".json",))
READABLE = (
    "expected .txt, .md, .py, .rst, .tex, .jsonl, .json, .csv, .tsv, .parquet or .arrow; text also as .gz, .zst, .bz2"
)
MOST_ENTRIES = 500_000  # files and folders that are looked at for one path
CHUNK = 2**20  # bytes looked at or unpacked at a time
SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
}
# ` = Title = `, with exactly one pair of equals signs, opens a WikiText article; ` = = Section = = ` does not.
ARTICLE_HEADING = re.compile(r" = (?!=).*(?<!=) = ?")


def builtin_modules() -> dict[str, Path]:
    """Return the file of each module of the built-in corpus that the running Python has, in alphabetical order.

    Raises:
        UserError: the standard library is zipped, compiled only, or absent.
    """
    lines = Path(__file__).with_name("builtin.txt").read_text(encoding="utf-8").splitlines()
    names = " ".join(line for line in lines if not line.startswith("#")).split()
    root = Path(sysconfig.get_path("stdlib"))
    found: dict[str, Path] = {}
    for name in names:
        module = root.joinpath(*name.split("."))
        for file in (module.with_name(module.name + ".py"), module / "__init__.py"):
            if file.is_file() and file.read_bytes().strip():
                found[name] = file
                break
    if len(found) < len(names) // 2:
        raise UserError(
            f"the standard library's source is not in {root} ({len(found)} of {len(names)} modules): "
            "a zipped or stripped Python; data=text data.path=FILE trains on your own text"
        )
    return found


def find(path: str) -> list[Path]:
    """Return the readable files of a file, a folder (searched to the bottom) or a glob, sorted.

    Raises:
        UserError: nothing there, a file of a kind that cannot be read, or too much to look through.
    """
    here = Path(path).expanduser()
    if here.is_dir():
        return _in_folder(here)
    files = [here] if here.is_file() else sorted(_Search(path, links=True).matching(Path(), here.parts))
    files = [file for file in files if file.is_file()]
    if not files:
        if os.path.lexists(here):  # a pipe, a device, a link that leads nowhere
            raise UserError(f"data.path: '{path}' is neither a file nor a folder: write its text to a file first")
        nearby = [p.name for p in here.parent.iterdir()] if here.parent.is_dir() else []
        if re.match(r"https?:/", path):
            raise UserError(f"data.path is '{path}': text is read from this machine, so download it first")
        hub = f": a data set of the hub is data.dataset={path}" if re.fullmatch(r"[\w-]+/[\w-]+", path) else ""
        raise UserError(f"data.path: no file matches '{path}'{did_you_mean(here.name, nearby) or hub}")
    for file in files:
        if not _kind(file):
            raise UserError(f"data.path: '{file}' ends in '{file.suffix}': {READABLE}")
    return files


def _in_folder(folder: Path) -> list[Path]:
    inside = _Search(str(folder), links=False).matching(folder, ("**",))
    found = [file for file in inside if _kind(file) and file.is_file()]
    if saved := saved_to_disk(folder):
        return sorted(itertools.chain(*saved.values()))
    for kinds in KINDS:
        # Plain ones first: what a folder meant before packed files were read, it still means.
        for files in ([f for f in found if f.suffix in kinds], [f for f in found if _kind(f) in kinds]):
            if not files:
                continue
            others = sorted({_kind(file) for file in found if file not in set(files)})
            if others:
                line = "data.path: of '%s' the %s files are read, not its %s: a glob such as '%s/**/*%s' names others"
                read = ", ".join(sorted({_kind(file) for file in files}))
                logger.info(line, folder, read, ", ".join(others), folder, others[0])
            return sorted(files)
    raise UserError(f"data.path: no file in the folder '{folder}' can be read: {READABLE}")


@dataclasses.dataclass
class _Search:
    """A glob as in the standard library, with a bound on the files and folders it visits."""

    path: str  # as it was asked for
    links: bool  # whether ** goes into linked folders
    looked_at: int = 0

    def matching(self, folder: Path, pattern: tuple[str, ...]) -> Iterator[Path]:
        """What a pattern stands for, from a folder on; without what is hidden, unless a part says so.

        Raises UserError if more than `MOST_ENTRIES` files and folders were looked at.
        """
        if not pattern:
            yield folder
            return
        first, rest = pattern[0], pattern[1:]
        if glob.escape(first) == first:
            if os.path.lexists(folder / first):
                yield from self.matching(folder / first, rest)
            return
        if first == "**":
            yield from self.matching(folder, rest)
        like = re.compile(fnmatch.translate(first))
        for entry in self._entries(folder):
            if (entry.name.startswith(".") and not first.startswith(".")) or not like.match(entry.name):
                continue
            if first == "**" and self._is_folder(entry, links=self.links):
                yield from self.matching(folder / entry.name, pattern)
            elif not rest or (first != "**" and self._is_folder(entry, links=True)):
                yield from self.matching(folder / entry.name, rest)

    def _is_folder(self, entry: "os.DirEntry[str]", links: bool) -> bool:
        try:
            return entry.is_dir(follow_symlinks=links)
        except OSError:  # links in a circle
            return False

    def _entries(self, folder: Path) -> "Iterator[os.DirEntry[str]]":
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                self.looked_at += 1
                if self.looked_at > MOST_ENTRIES:
                    raise UserError(
                        f"data.path is '{self.path}': more than {MOST_ENTRIES:,} files and folders to look through, "
                        "expected a narrower one, or texts put together in .jsonl or .parquet"
                    )
                yield entry


def saved_to_disk(folder: Path) -> dict[str, list[Path]]:
    """The files of a folder that `datasets` wrote with save_to_disk, by split; empty for any other folder."""
    states = [folder / "state.json"] if (folder / "state.json").is_file() else sorted(folder.glob("*/state.json"))
    # Beside them may lie what `datasets` remembers of computations, cache-*.arrow.
    found = {state.parent: sorted(state.parent.glob("data-*.arrow")) for state in states}
    return {"train" if at == folder else at.name: files for at, files in found.items() if files}


def _kind(file: Path) -> str:
    """`.csv` for `a.csv` and `a.csv.gz`; empty for what cannot be read."""
    inner = Path(file.stem) if (packed := file.suffix.lower() in PACKED) else file
    kind = inner.suffix.lower()
    return kind if any(kind in kinds for kinds in KINDS) and not (packed and kind in (".parquet", ".arrow")) else ""


def by_split(files: list[Path], root: Path) -> dict[str, list[Path]]:
    """Sort files into given splits by the words that begin or end their names, or by their folders.

    `train-00000-of-00001.parquet`, `wiki.valid.txt` and `test/a.txt` say where they belong. Only when every file
    says so are the splits given; otherwise the result is empty and the caller splits the documents itself. If only
    some files say so, as titles and modules of code can, that is a warning.

    Raises:
        UserError: held-out files are given, but no training file; or most files are in training and held-out splits,
            but not all.
    """
    splits: dict[str, list[Path]] = {}
    others: list[Path] = []
    for file in files:
        split = _split_of(file.relative_to(root) if file.is_relative_to(root) else Path(file.name))
        (others if split is None else splits.setdefault(split, [])).append(file)
    if others:
        if splits:
            _say_mixed(splits, others, root)
        return {}
    if "train" not in splits:
        raise UserError(
            f"data.path: '{root}' has {' and '.join(sorted(splits))} files but no train file: "
            "add one, or give a single file to split"
        )
    return splits


def _say_mixed(splits: dict[str, list[Path]], others: list[Path], root: Path) -> None:
    named = sum(map(len, splits.values()))
    every, words = named + len(others), ", ".join(sorted(splits, reverse=True))
    if "train" in splits and len(splits) > 1 and named > len(others):
        raise UserError(
            f"data.path: '{others[0]}' is of no split, while {named} of {every} files have names of splits ({words}): "
            "move it away, rename it, or leave it out with a glob"
        )
    logger.warning(
        "data.path: %d of the %d files of '%s' have names of splits (%s), '%s' has none: all are split anew",
        *(named, every, root, words, others[0]),
    )


def _split_of(file: Path) -> str | None:
    name = file.stem if file.suffix.lower() in PACKED else file.name
    words = re.split(r"[._-]", Path(name).stem.lower())
    for word in (words[0], words[-1], *(part.lower() for part in file.parts[:-1])):
        if word in SPLIT_WORDS:
            return SPLIT_WORDS[word]
    return None


def read(files: Sequence[Path], column: str, articles: bool, limit: int | None) -> Iterator[str]:
    """Yield the documents of files, at most `limit`; blank ones are left out.

    Raises:
        UserError: no text, bytes that are not UTF-8, a row that is not what was promised, a missing column.
    """
    readers: dict[str, Callable[[Path, str], Iterator[str]]] = {
        **dict.fromkeys(WHOLE, _whole),
        ".jsonl": _jsonl,
        ".json": _json,
        ".parquet": _parquet,
        **dict.fromkeys((".csv", ".tsv"), _csv),
        ".arrow": _arrow,
    }
    texts: Iterator[str] = itertools.chain.from_iterable(readers[_kind(file)](file, column) for file in files)
    if articles:
        texts = join_articles(texts)
    where = f"'{files[0]}'" + (f" and {len(files) - 1} more files" if len(files) > 1 else "")
    yield from documents(texts, limit, where)


def documents(texts: Iterable[str | None], limit: int | None, where: str) -> Iterator[str]:
    """Yield each text that is not blank, at most `limit`; UserError if there is none."""
    limit_of_one, n_found = bounds.document(), 0
    for text in texts:
        if n_found == limit:
            break
        if text and text.strip():
            if len(text) > limit_of_one[0]:
                raise bounds.too_large(f"a document of {where}", limit_of_one, "shorter ones")
            n_found += 1
            yield text
    if not n_found:
        raise UserError(f"no text in {where}: 0 documents that are not blank")


def join_articles(texts: Iterable[str]) -> Iterator[str]:
    """Join WikiText, given line by line or whole, to articles: a first-level heading after a blank line starts one."""
    article: list[str] = []
    blank = True
    for line in itertools.chain.from_iterable(text.removesuffix("\n").split("\n") for text in texts):
        if blank and ARTICLE_HEADING.fullmatch(line) and article:
            yield "".join(article)
            article = []
        article.append(line + "\n")
        blank = not line.strip()
    yield "".join(article)


@contextlib.contextmanager
def _open(file: Path) -> Iterator[io.BufferedReader]:
    """The unpacked bytes of a file, bounded by its size."""
    packing = file.suffix.lower()
    if packing not in PACKED:
        with file.open("rb") as plain:
            yield plain
        return
    try:
        with {".gz": gzip.open, ".bz2": bz2.open, ".zst": _open_zst}[packing](file) as stream:  # type: ignore[operator]
            yield io.BufferedReader(_Counted(stream, file), CHUNK)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"'{file}' cannot be unpacked: {str(error).splitlines()[0]}") from None


class _Counted(io.RawIOBase):
    """The unpacked stream of a packed file; UserError at a read that is too much for a file of its size."""

    def __init__(self, stream: IO[bytes], file: Path) -> None:
        self.stream = stream
        self.unpacked = bounds.unpacked(file)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.stream.read(len(buffer))
        self.unpacked.add(len(data))
        buffer[: len(data)] = data
        return len(data)


def _open_zst(file: Path) -> IO[bytes]:
    import pyarrow

    return pyarrow.input_stream(str(file), compression="zstd")  # type: ignore[no-any-return]


def _whole(file: Path, column: str) -> Iterator[str]:
    with _open(file) as stream:
        text = _decode(_all(stream, file, bounds.document()), file)
    yield text


def _all(stream: io.BufferedReader, file: Path, limit: tuple[int, str]) -> bytearray:
    """All bytes of a stream; UserError if they are more than the limit."""
    content = bytearray()
    too_large = file.suffix.lower() not in PACKED and file.stat().st_size > limit[0]
    while chunk := stream.read(CHUNK):
        content += chunk
        if too_large or len(content) > limit[0]:
            raise bounds.too_large(f"'{file}', one document," if _kind(file) in WHOLE else f"'{file}'", limit)
    return content


def _decode(raw: bytes | bytearray, file: Path, start: int = 0) -> str:
    """Decode bytes that begin at byte `start` of a file."""
    mark = len(codecs.BOM_UTF8) if start == 0 and raw.startswith(codecs.BOM_UTF8) else 0
    try:
        return str(memoryview(raw)[mark:], "utf-8")
    except UnicodeDecodeError as error:
        at = mark + error.start
        raise UserError(_not_utf8(file, start + at, raw[at])) from None


def _jsonl(file: Path, column: str) -> Iterator[str]:
    start, limit = 0, bounds.json_text()
    with _open(file) as stream:
        for number in itertools.count(1):
            raw = stream.readline(limit[0] + 1)
            if not raw:
                return
            if len(raw) > limit[0]:
                raise bounds.too_large(f"'{file}' line {number}", limit, "shorter lines, or a document per .txt file")
            line = _decode(raw, file, start)
            start += len(raw)
            if line.strip():
                where = f"'{file}' line {number}"
                yield _cell(_parsed(line, where), where, column)


def _json(file: Path, column: str) -> Iterator[str]:
    """One object or a list of them. `datasets` would make dates of texts, and rewrite a column of two types."""
    with _open(file) as stream:
        text = _decode(_all(stream, file, bounds.json_text()), file)
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # an object per line, under the name of one
            yield from _jsonl(file, column)
            return
        raise UserError(f"'{file}' is not JSON: {error.msg}, line {error.lineno}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"'{file}' cannot be read: {str(error).split(';')[0]}") from None
    for number, row in enumerate(rows if isinstance(rows, list) else [rows], start=1):
        yield _cell(row, f"'{file}' row {number}", column)


def _parsed(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, lists in lists in lists
        raise UserError(f"{where} cannot be read: {str(error).split(';')[0]}") from None


def _cell(row: Any, where: str, column: str) -> str:
    if not isinstance(row, dict):
        raise UserError(f"{where} is not a JSON object: expected one with a column '{column}'")
    if column not in row:
        raise UserError(missing_column(where, column, row))
    return _text(row[column], where, column)


def _parquet(file: Path, column: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    unpacked, number = bounds.unpacked(file), 0
    try:
        names = pyarrow.parquet.read_schema(file).names
        if column not in names:
            raise UserError(missing_column(f"'{file}'", column, names))
        # As indices of different values: what is written once can stand in millions of rows.
        table = pyarrow.parquet.ParquetFile(file, read_dictionary=[column])
        for batch in table.iter_batches(batch_size=1024, columns=[column]):
            for value in batch.column(0):
                number += 1
                yield _text(value.as_py(), f"'{file}' row {number}", column, unpacked)
    except (OSError, pyarrow.ArrowException) as error:
        what = f"'{file}' after row {number} cannot be read" if number else f"'{file}' is not a parquet file"
        raise UserError(f"{what}: {str(error).splitlines()[0]}") from None


_CSV_ROWS = 16  # read at a time


def _csv(file: Path, column: str) -> Iterator[str]:
    """The one column as it is written: 007 is no number, and NA and nothing are text."""
    import pandas

    kind, number = _kind(file), 0
    separator = {".csv": ",", ".tsv": "\t"}[kind]
    try:
        with _open(file) as stream:
            header = pandas.read_csv(_Rows(stream, file), sep=separator, nrows=0).columns
        if column not in header:
            raise UserError(_other_separator(file, header) or missing_column(f"'{file}'", column, header))
        with _open(file) as stream:
            source = _Rows(stream, file)
            rows = pandas.read_csv(
                source,
                sep=separator,
                dtype=str,  # of all columns: usecols would drop surplus cells silently
                keep_default_na=False,
                chunksize=_CSV_ROWS,
            )
            for chunk in rows:
                source.begin()
                if not isinstance(chunk.index, pandas.RangeIndex):  # pandas took the surplus cells for an index
                    raise UserError(
                        f"'{file}' has rows with more cells than its header: expected quotation marks around a text "
                        f"with {separator!r} in it"
                    )
                for value in chunk[column]:
                    number += 1
                    yield _text(value, f"'{file}' row {number}", column)
    except ValueError as error:  # pandas raises its own, which are ValueErrors
        raise UserError(f"'{file}' cannot be read as {kind}: {str(error).splitlines()[0]}") from None


def _other_separator(file: Path, header: Iterable[str]) -> str:
    """The message for a table whose one column is several with another separator between; empty for another table."""
    only, *more = header
    kind = _kind(file)
    expected = {".csv": "commas", ".tsv": "tabs"}[kind]
    found = next((sign for sign in (";", "\t", ",") if sign in only), None)
    if more or found is None:
        return ""
    named = {";": "semicolons", "\t": "tabs", ",": "commas"}[found]
    other = {"\t": "name it .tsv", ",": "name it .csv"}.get(found, "save it with commas, or as .jsonl or .parquet")
    return f"'{file}' seems to have {named} between its columns, expected {expected} in a {kind}: {other}"


class _Rows(io.RawIOBase):
    """The bytes of a table of text, checked to be UTF-8, with a bound on what one piece of rows may take.

    A quotation mark that nothing closes makes one cell of all that follows.
    """

    def __init__(self, stream: io.BufferedReader, file: Path) -> None:
        self.stream, self.file, self.limit = stream, file, bounds.document()
        self.decoder, self.at, self.of_rows = codecs.getincrementaldecoder("utf-8")(), 0, 0

    def begin(self) -> None:
        """Start counting for the next piece of rows."""
        self.of_rows = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        chunk = self.stream.read(len(buffer))
        begun = self.at - len(self.decoder.getstate()[0])  # where a character that the last chunk cut began
        try:
            self.decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            raise UserError(_not_utf8(self.file, begun + error.start, error.object[error.start])) from None
        self.at += len(chunk)
        self.of_rows += len(chunk)
        if self.of_rows > self.limit[0]:
            what = f"a row of '{self.file}' (or {_CSV_ROWS} together)"
            raise bounds.too_large(what, self.limit, "shorter rows, each quotation mark closed")
        buffer[: len(chunk)] = chunk
        return len(chunk)


def _arrow(file: Path, column: str) -> Iterator[str]:
    """The rows of an Arrow file written by `datasets`."""
    import datasets
    import pyarrow

    unpacked = bounds.unpacked(file)
    try:
        every = {"data_files": glob.escape(str(file)), "split": "train", "streaming": True}
        rows = datasets.load_dataset("arrow", **every)
        first = next(iter(rows), {column: ""})
        if column not in first:
            raise UserError(missing_column(f"'{file}'", column, first))
        for number, row in enumerate(rows.select_columns([column]), start=1):
            yield _text(row[column], f"'{file}' row {number}", column, unpacked)
    except (ValueError, pyarrow.ArrowException, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"'{file}' cannot be read as .arrow: {reason(error)}") from None


def reason(error: BaseException) -> str:
    """The root cause of an error, in one line: `datasets` wraps errors in generic ones."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:400] or type(error).__name__


def _not_utf8(file: Path, at: int, byte: int) -> str:
    return f"'{file}' is not UTF-8 text: byte {at} is 0x{byte:02x}"


def _text(value: Any, where: str, column: str, unpacked: bounds.Count | None = None) -> str:
    """Check one cell, and count its bytes; a null is a blank document."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{where}: column '{column}' holds {type(value).__name__}: expected text")
    try:
        size = len(value.encode("utf-8"))
    except UnicodeEncodeError:
        raise UserError(f"{where}: column '{column}' holds half of a surrogate pair, which is not text") from None
    if unpacked:
        unpacked.add(size)
    return value


def missing_column(where: str, column: str, columns: Iterable[str]) -> str:
    """The message for a missing column."""
    names = list(columns)
    return f"{where} has no column '{column}': it has {', '.join(names) or 'none'}{did_you_mean(column, names)}"
