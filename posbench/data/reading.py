"""Documents from files on this machine: which files, which split each belongs to, and their text.

Prose and code (`.txt`, `.md`, `.py` ...) hold one document per file, tables (`.jsonl`, `.parquet`, `.csv` ...) one per
row; all that is text may be packed (`.gz`, `.zst`, `.bz2`). It is read as strict UTF-8; line ends stay as they are; a
byte-order mark is dropped, being no text. A folder may be one that `datasets` saved with save_to_disk.
"""

import bz2
import codecs
import contextlib
import glob
import gzip
import io
import itertools
import json
import logging
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from posbench.errors import UserError, did_you_mean

logger = logging.getLogger(__name__)

PACKED = (".gz", ".zst", ".bz2")
WHOLE = (".txt", ".md", ".py", ".rst", ".tex")  # a document each
# What a folder's text is: the files of the first of these kinds that it has. Reports and settings lie beside data.
KINDS = ((".txt", ".jsonl", ".parquet"), (".csv", ".tsv", ".arrow"), WHOLE, (".json",))
READABLE = (
    "expected .txt, .md, .py, .rst, .tex, .jsonl, .json, .csv, .tsv, .parquet or .arrow; text also as .gz, .zst, .bz2"
)
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
        UserError: nothing there, or a file of a kind that cannot be read.
    """
    here = Path(path).expanduser()
    if here.is_dir():
        return _in_folder(here)
    files = [here] if here.is_file() else sorted(map(Path, glob.glob(str(here), recursive=True)))
    files = [file for file in files if file.is_file()]
    if not files:
        nearby = [p.name for p in here.parent.iterdir()] if here.parent.is_dir() else []
        hub = f": a data set of the hub is data.dataset={path}" if re.fullmatch(r"[\w-]+/[\w-]+", path) else ""
        raise UserError(f"data.path: no file matches '{path}'{did_you_mean(here.name, nearby) or hub}")
    for file in files:
        if not _kind(file):
            raise UserError(f"data.path: '{file}' ends in '{file.suffix}': {READABLE}")
    return files


def _in_folder(folder: Path) -> list[Path]:
    inside = (file for file in folder.rglob("*") if not any(p.startswith(".") for p in file.relative_to(folder).parts))
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
    n_found = 0
    for text in texts:
        if n_found == limit:
            break
        if text and text.strip():
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
def _open(file: Path) -> Iterator[IO[bytes]]:
    """The unpacked bytes of a file."""
    packing = file.suffix.lower()
    if packing not in PACKED:
        with file.open("rb") as plain:
            yield plain
        return
    try:
        with {".gz": gzip.open, ".bz2": bz2.open, ".zst": _open_zst}[packing](file) as stream:  # type: ignore[operator]
            yield stream
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"'{file}' cannot be unpacked: {str(error).splitlines()[0]}") from None


def _open_zst(file: Path) -> IO[bytes]:
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(file), compression="zstd"))


def _whole(file: Path, column: str) -> Iterator[str]:
    with _open(file) as stream:
        text = _decode(stream.read(), file)
    yield text


def _decode(raw: bytes, file: Path, start: int = 0) -> str:
    """Decode bytes that begin at byte `start` of a file."""
    mark = len(codecs.BOM_UTF8) if start == 0 and raw.startswith(codecs.BOM_UTF8) else 0
    try:
        return raw[mark:].decode()
    except UnicodeDecodeError as error:
        at = mark + error.start
        raise UserError(f"'{file}' is not UTF-8 text: byte {start + at} is 0x{raw[at]:02x}") from None


def _jsonl(file: Path, column: str) -> Iterator[str]:
    start = 0
    with _open(file) as stream:
        for number, raw in enumerate(stream, start=1):
            line = _decode(raw, file, start)
            start += len(raw)
            if line.strip():
                where = f"'{file}' line {number}"
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise UserError(f"{where} is not JSON: {error}") from None
                yield _cell(row, where, column)


def _json(file: Path, column: str) -> Iterator[str]:
    """One object or a list of them. `datasets` would make dates of texts, and rewrite a column of two types."""
    with _open(file) as stream:
        text = _decode(stream.read(), file)
    try:
        rows = json.loads(text)
    except ValueError as error:
        if "Extra data" in str(error):  # an object per line, under the name of one
            yield from _jsonl(file, column)
            return
        raise UserError(f"'{file}' is not JSON: {error}") from None
    for number, row in enumerate(rows if isinstance(rows, list) else [rows], start=1):
        yield _cell(row, f"'{file}' row {number}", column)


def _cell(row: Any, where: str, column: str) -> str:
    if not isinstance(row, dict):
        raise UserError(f"{where} is not a JSON object: expected one with a column '{column}'")
    if column not in row:
        raise UserError(missing_column(where, column, row))
    return _text(row[column], where, column)


def _parquet(file: Path, column: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        table = pyarrow.parquet.ParquetFile(file)
        if column not in table.schema_arrow.names:
            raise UserError(missing_column(f"'{file}'", column, table.schema_arrow.names))
        for batch in table.iter_batches(batch_size=1024, columns=[column]):
            for value in batch.column(0):
                number += 1
                yield _text(value.as_py(), f"'{file}' row {number}", column)
    except (OSError, pyarrow.ArrowException) as error:
        what = f"'{file}' after row {number} cannot be read" if number else f"'{file}' is not a parquet file"
        raise UserError(f"{what}: {str(error).splitlines()[0]}") from None


def _csv(file: Path, column: str) -> Iterator[str]:
    """The one column as it is written: 007 is no number, and NA and nothing are text."""
    import pandas

    kind, number = _kind(file), 0
    separator = {".csv": ",", ".tsv": "\t"}[kind]
    # All columns are read, since usecols would drop surplus cells silently.
    how: dict[str, Any] = {"sep": separator, "dtype": str, "keep_default_na": False, "chunksize": 256}
    try:
        with _open(file) as stream:
            for chunk in pandas.read_csv(stream, **how):
                if column not in chunk.columns:
                    raise UserError(missing_column(f"'{file}'", column, chunk.columns))
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


def _arrow(file: Path, column: str) -> Iterator[str]:
    """The rows of an Arrow file written by `datasets`."""
    import datasets
    import pyarrow

    try:
        every = {"data_files": glob.escape(str(file)), "split": "train", "streaming": True}
        rows = datasets.load_dataset("arrow", **every)
        first = next(iter(rows), {column: ""})
        if column not in first:
            raise UserError(missing_column(f"'{file}'", column, first))
        for number, row in enumerate(rows.select_columns([column]), start=1):
            yield _text(row[column], f"'{file}' row {number}", column)
    except (ValueError, pyarrow.ArrowException, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"'{file}' cannot be read as .arrow: {reason(error)}") from None


def reason(error: BaseException) -> str:
    """The root cause of an error, in one line: `datasets` wraps errors in generic ones."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:400] or type(error).__name__


def _text(value: Any, where: str, column: str) -> str:
    """Check one cell; a null is a blank document."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{where}: column '{column}' holds {type(value).__name__}: expected text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UserError(f"{where}: column '{column}' holds half of a surrogate pair, which is not text") from None
    return value


def missing_column(where: str, column: str, columns: Iterable[str]) -> str:
    """The message for a missing column."""
    names = list(columns)
    return f"{where} has no column '{column}': it has {', '.join(names) or 'none'}{did_you_mean(column, names)}"
