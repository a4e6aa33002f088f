"""CSV of values that may be a stranger's: no text in it is a formula to a spreadsheet."""

import csv
import io
import re
from collections.abc import Iterable, Mapping
from typing import Any

from posbench.terminal.exits import one_line

_FORMULA = re.compile(r"((?:^|[;|])[\s\"]*)(?=[=+@-])")  # the start of a formula in a text


def csv_text(columns: list[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows under these columns, below a line with the columns' names; missing values are empty."""
    return csv_rows(columns, [dict(zip(columns, columns, strict=True))]) + csv_rows(columns, rows)


def csv_rows(columns: list[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """The rows alone."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([_cell(row.get(column)) for column in columns] for row in rows)
    return out.getvalue()


def _cell(value: Any) -> Any:
    """Numbers unchanged; a text that a spreadsheet would read as a formula gets a `'` before it.

    The same after a semicolon, where some spreadsheets split cells even within quotes.
    """
    if value is None or isinstance(value, bool | int | float):
        return value
    return _FORMULA.sub(r"\1'", one_line(str(value)))
