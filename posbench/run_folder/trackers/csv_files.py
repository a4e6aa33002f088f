"""CSV files in the run folder: `csv/metrics.csv`, `csv/evaluation.csv`, a column per name, and `csv/summary.csv`.

A session begins by writing the files anew from the run folder's records, so a kill neither loses nor doubles a row.
"""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posbench import files
from posbench.run_folder.logged import LINE
from posbench.run_folder.trackers.base import Row, TrackedRun
from posbench.terminal.spreadsheets import csv_rows, csv_text


class CsvFiles:
    """The tracker `csv`."""

    def __init__(self, run: TrackedRun, rows: Sequence[Row]) -> None:
        self._folder = run.folder / "csv"
        self._folder.mkdir(exist_ok=True)
        files.remove_stale(self._folder)
        self._metrics = _Table(self._folder / "metrics.csv", [row for row in rows if LINE not in row])
        self._evaluation = _Table(self._folder / "evaluation.csv", [row for row in rows if LINE in row])
        self._summary: dict[str, Any] = {}

    def log(self, row: Row) -> None:
        (self._evaluation if LINE in row else self._metrics).append(row)

    def summary(self, values: Mapping[str, Any]) -> None:
        self._summary |= values
        rows = [{"name": name, "value": value} for name, value in self._summary.items()]
        files.write(self._folder / "summary.csv", csv_text(["name", "value"], rows).encode())

    def finish(self, status: str) -> None:
        self._metrics.close()
        self._evaluation.close()


class _Table:
    """A file to which rows of numbers are appended. A row with a new name is written together with all before it."""

    def __init__(self, path: Path, rows: Sequence[Row]) -> None:
        self._path = path
        self._write(rows)

    def append(self, row: Row) -> None:
        if row.keys() <= set(self._columns):
            self._file.write(csv_rows(self._columns, [row]).encode())
            return
        self.close()
        with open(self._path, encoding="utf-8", newline="") as file:
            before = [{name: _number(cell) for name, cell in line.items() if cell} for line in csv.DictReader(file)]
        self._write([*before, row])

    def close(self) -> None:
        self._file.close()

    def _write(self, rows: Sequence[Row]) -> None:
        self._columns = list(dict.fromkeys(name for row in rows for name in row))
        files.write(self._path, csv_text(self._columns, rows).encode() if rows else b"")
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 - a row is one call: a kill leaves no half


def _number(cell: str) -> int | float:
    return int(cell) if cell.lstrip("-").isdigit() else float(cell)
