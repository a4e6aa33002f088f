"""Documents of files on this machine: one per file of prose or code, one per row of a table.

Text is strict UTF-8, with or without a byte-order mark. Line ends, NUL bytes and cells such as NA stay as they are.
"""

import bz2
import contextlib
import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import pyarrow
import pyarrow.parquet

from posbench.data.paths import WHOLE, kind
from posbench.errors import UserError, did_you_mean


def read_all(paths: Iterable[Path], column: str) -> Iterator[str]:
    """Yield the documents of files, one file after another."""
    for path in paths:
        yield from read(path, column)


def read(path: Path, column: str) -> Iterator[str]:
    """Yield the documents of a file, empty ones included.

    Raises:
        UserError: in one line with the file and the row: no such column, a cell that is no text, another format.
    """
    row = 1
    try:
        for value in READERS[kind(path)](path, column):
            yield checked(value, column)
            row += 1
    except (ValueError, OSError, EOFError, RuntimeError, csv.Error, zlib.error) as error:
        where = f"'{path}'" if kind(path) in WHOLE else f"'{path}' row {row}"
        reason = str(error).partition("\n")[0] or type(error).__name__
        if isinstance(error, UnicodeDecodeError):
            reason = f"not UTF-8 text (byte 0x{error.object[error.start]:02x}): iconv converts other encodings"
        if path.suffix.lower() == ".zst" and isinstance(error, OSError):
            reason += ": zstd -d unpacks what was packed with --long"
        raise UserError(f"{where}: {reason}") from None


def checked(value: Any, column: str) -> str:
    """Return a cell's text, that of null being empty; ValueError for what is no text."""
    if value is not None and not isinstance(value, str):
        raise ValueError(f"column '{column}' holds {type(value).__name__}: expected text")
    (value or "").encode()  # fails for half of a surrogate pair
    return value or ""


def missing(column: str, columns: Sequence[str]) -> ValueError:
    """Return the error for a column that is not there."""
    return ValueError(f"no column '{column}', only {', '.join(columns) or 'none'}{did_you_mean(column, columns)}")


@contextlib.contextmanager
def _unpacked(path: Path) -> Iterator[IO[bytes]]:
    opening: dict[str, Callable[..., Any]] = {
        ".gz": gzip.open,
        ".bz2": bz2.open,
        ".zst": lambda path, mode: io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd")),
    }
    with opening.get(path.suffix.lower(), open)(path, "rb") as file:
        head = file.peek(4096)[:4096]
        if max(head[::2].count(0), head[1::2].count(0)) > len(head) / 4:
            raise ValueError("this looks like UTF-16, not UTF-8: iconv -f UTF-16 converts it")
        yield file


def _whole(path: Path, column: str) -> Iterator[Any]:
    with _unpacked(path) as file:
        yield file.read().decode("utf-8-sig")


def _lines(path: Path, column: str) -> Iterator[Any]:
    with _unpacked(path) as file:
        for number, line in enumerate(file):
            text = line.decode("utf-8" if number else "utf-8-sig")
            yield _cell(json.loads(text), column) if text.strip() else None


def _json(path: Path, column: str) -> Iterator[Any]:
    """A list of objects, one object, or an object per line."""
    (text,) = _whole(path, column)
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise
        yield from _lines(path, column)
    else:
        yield from (_cell(row, column) for row in (rows if isinstance(rows, list) else [rows]))


def _cell(row: Any, column: str) -> Any:
    if not isinstance(row, dict):
        raise ValueError(f"not a JSON object: expected one with a column '{column}'")
    if column not in row:
        raise missing(column, [*row])
    return row[column]


def _table(path: Path, column: str) -> Iterator[Any]:
    csv.field_size_limit(2**31 - 1)
    with _unpacked(path) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as lines:
        rows = csv.reader(lines, delimiter="\t" if kind(path) == ".tsv" else ",", strict=True)
        try:
            header = next(rows, [])
            if column not in header:
                raise missing(column, header)
            for row in rows:
                if row and len(row) != len(header):
                    raise ValueError(f"{len(row)} cells under {len(header)} columns: quote cells with separators")
                yield row[header.index(column)] if row else None
        except csv.Error as error:
            raise ValueError(f"{error}: a cell that begins with a quotation mark must end with one") from None


def _columnar(path: Path, column: str) -> Iterator[Any]:
    """Rows of Parquet, or of Arrow as `datasets` writes it."""
    source = pyarrow.memory_map(str(path))
    file = pyarrow.parquet.ParquetFile(source) if kind(path) == ".parquet" else pyarrow.ipc.open_stream(source)
    schema = file.schema_arrow if kind(path) == ".parquet" else file.schema
    if column not in schema.names:
        raise missing(column, schema.names)
    if pyarrow.types.is_nested(schema.field(column).type):
        raise ValueError(f"column '{column}' holds {schema.field(column).type}: expected text")
    # Few rows at a time: each may be a book.
    for batch in file.iter_batches(batch_size=64, columns=[column]) if kind(path) == ".parquet" else file:
        yield from (cell.as_py() for cell in batch.column(column))


READERS: dict[str, Callable[[Path, str], Iterator[Any]]] = {
    **dict.fromkeys(WHOLE, _whole), ".jsonl": _lines, ".json": _json, ".csv": _table, ".tsv": _table,
    ".parquet": _columnar, ".arrow": _columnar,
}  # fmt: skip
