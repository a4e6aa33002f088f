"""Documents of files on this machine: one per file of prose or code, one per row of a table.

Text is strict UTF-8, with or without a byte-order mark. Line ends, NUL bytes and cells such as NA stay as they are.
"""

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from posbench.data.paths import WHOLE, kind
from posbench.errors import UserError, did_you_mean


def read_all(paths: Iterable[Path], column: str) -> Iterator[str]:
    """Yield the documents of files, empty ones included; UserError with the file and the row for what is no text."""
    row = 1
    try:
        for path in paths:
            row = 1
            for value in READERS[kind(path)](path, column):
                yield checked(value, column)
                row += 1
    except (ValueError, OSError, RuntimeError, csv.Error) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        if isinstance(error, UnicodeDecodeError):
            reason = f"not UTF-8 text (byte 0x{error.object[error.start]:02x}): iconv converts other encodings"
        if isinstance(error, csv.Error):
            reason += ": a cell that begins with a quotation mark must end with one"
        raise UserError(f"'{path}'{'' if kind(path) in WHOLE else f' row {row}'}: {reason}") from None


def checked(value: Any, column: str) -> str:
    """Return a cell's text, that of null being empty; ValueError for what is no text."""
    if not isinstance(value, str | None):
        raise ValueError(f"column '{column}' holds {type(value).__name__}: expected text")
    (value or "").encode()  # fails for half of a surrogate pair
    return value or ""


def refuse_missing(column: str, columns: Sequence[str]) -> None:
    """Raise ValueError if the column is not there."""
    if column not in columns:
        raise ValueError(f"no column '{column}', only {', '.join(columns) or 'none'}{did_you_mean(column, columns)}")


def _bytes(path: Path) -> io.BufferedReader:
    file = io.BufferedReader(pyarrow.input_stream(str(path)))
    head = file.peek(4096)[:4096]
    if max(head[::2].count(0), head[1::2].count(0)) > len(head) / 4:
        raise ValueError("this looks like UTF-16, not UTF-8: iconv -f UTF-16 converts it")
    return file


def _whole(path: Path, column: str) -> Iterator[Any]:
    yield _bytes(path).read().decode("utf-8-sig")


def _lines(path: Path, column: str) -> Iterator[Any]:
    for number, line in enumerate(_bytes(path)):
        text = line.decode("utf-8" if number else "utf-8-sig")
        yield _cell(json.loads(text), column) if text.strip() else None


def _json(path: Path, column: str) -> Iterator[Any]:
    """A list of objects, or an object per line."""
    (text,) = _whole(path, column)
    is_list = text.lstrip().startswith("[")
    yield from (_cell(row, column) for row in json.loads(text)) if is_list else _lines(path, column)


def _cell(row: Any, column: str) -> Any:
    refuse_missing(column, [*row] if isinstance(row, dict) else [])
    return row[column]


def _table(path: Path, column: str) -> Iterator[Any]:
    csv.field_size_limit(2**31 - 1)
    lines = io.TextIOWrapper(_bytes(path), "utf-8-sig", newline="")
    rows = csv.reader(lines, delimiter="\t" if kind(path) == ".tsv" else ",", strict=True)
    refuse_missing(column, header := next(rows, []))
    for row in rows:
        if row and len(row) != len(header):
            raise ValueError(f"{len(row)} cells under {len(header)} columns: quote cells with separators")
        yield row[header.index(column)] if row else None


def _columnar(path: Path, column: str) -> Iterator[Any]:
    """Rows of Parquet, or of Arrow as `datasets` writes it; few at a time, since each may be a book."""
    file: Any = parquet.ParquetFile(path) if kind(path) == ".parquet" else pyarrow.ipc.open_stream(path.open("rb"))
    refuse_missing(column, file.schema.names if kind(path) == ".arrow" else file.schema_arrow.names)
    for batch in file if kind(path) == ".arrow" else file.iter_batches(batch_size=64, columns=[column]):
        yield from (cell.as_py() for cell in batch.column(column))


READERS: dict[str, Callable[[Path, str], Iterator[Any]]] = {
    **dict.fromkeys(WHOLE, _whole), ".jsonl": _lines, ".json": _json, ".csv": _table, ".tsv": _table,
    ".parquet": _columnar, ".arrow": _columnar,
}  # fmt: skip
