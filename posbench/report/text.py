"""Tables as text: in the terminal, Markdown and CSV. Names may come from strangers and are data everywhere."""

import csv
import io
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from posbench import files
from posbench.report.tables import Table
from posbench.terminal import tables
from posbench.terminal.console import carries_unicode
from posbench.terminal.exits import one_line

LONGEST_NAME = 24  # of a scheme that is kept on one line
BORDER = 2  # characters between two columns
_ASCII = str.maketrans({"±": "+-", "†": "'", "‡": '"', "≥": ">=", "²": "^2"})


def write(path: Path, text: str) -> None:
    """Replace a file, wholly or not at all; what UTF-8 cannot hold is spelt out."""
    files.write(path, text.encode("utf-8", "backslashreplace"))


# -- terminal ----------------------------------------------------------------------------------------------------------


def print_table(console: Console, table: Table) -> None:
    """Print a table without its note, in pieces where it is wider than the console.

    Control characters are spelt out and nothing is markup.
    """
    plain = not carries_unicode(console)
    for number, columns in enumerate(_pieces(table, console.width)):
        shown = tables.table(console)
        shown.title = None if number else _safe(table.title, plain)
        for column, width in _widths(table, columns, console.width).items():
            justify: Literal["left", "right"] = "right" if table.numeric[column] else "left"
            shown.add_column(_safe(table.columns[column], plain), justify=justify, overflow="fold", width=width)
        for row in table.rows:
            shown.add_row(*(_safe(row[column].text, plain) for column in columns))
        console.print(shown)


def _pieces(table: Table, room: int) -> list[list[int]]:
    """Columns cut into runs that fit, each with the first column before it."""
    first = _least_width(table, 0) + 2 * BORDER
    pieces, left = [[0]], room - first
    for column in range(1, len(table.columns)):
        width = _least_width(table, column) + BORDER
        if width > left and len(pieces[-1]) > 1:
            pieces.append([0])
            left = room - first
        pieces[-1].append(column)
        left -= width
    return pieces


def _widths(table: Table, columns: list[int], room: int) -> dict[int, int]:
    """A width for each column: what it must have, and of the rest most for those that lack most."""
    widths = {column: _least_width(table, column) for column in columns}
    lacking = {column: max(map(len, _texts(table, column))) - width for column, width in widths.items()}
    for _ in range(room - sum(widths.values()) - BORDER * (len(columns) + 1)):
        column = max(lacking, key=lambda one: lacking[one])
        if lacking[column] > 0:
            widths[column] += 1
            lacking[column] -= 1
    return widths


def _least_width(table: Table, column: int) -> int:
    """Of the first column the longest name, of others the longest word; both within reason."""
    texts = _texts(table, column)
    longest = max(len(part) for text in texts for part in ([text] if column == 0 else text.split() or [""]))
    return max(1, min(longest, LONGEST_NAME))


def _texts(table: Table, column: int) -> list[str]:
    # Spelt in ASCII, which is the wider of both ways.
    return [
        one_line(text.translate(_ASCII)) for text in (table.columns[column], *(row[column].text for row in table.rows))
    ]


def print_lines(console: Console, lines: Iterable[str]) -> None:
    """Print lines of text, each safely."""
    for line in lines:
        console.print(_safe(line, not carries_unicode(console)))


def _safe(text: str, plain: bool = False) -> Text:
    return Text(one_line(text.translate(_ASCII) if plain else text))


# -- Markdown ----------------------------------------------------------------------------------------------------------


def markdown(text: str) -> str:
    """Text in one line with nothing in it that Markdown or HTML would act on."""
    escaped = re.sub(r"([\\`*|\[\]~])", r"\\\1", one_line(text))
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def markdown_table(table: Table) -> str:
    rule = ["---:" if right else "---" for right in table.numeric]
    rows = [table.columns, *([value.text for value in row] for row in table.rows)]
    lines = ["| " + " | ".join(markdown(cell) for cell in row) + " |" for row in rows]
    lines.insert(1, "| " + " | ".join(rule) + " |")
    note = f"\n\n{markdown(table.note)}" if table.note else ""
    return f"### {markdown(table.title)}\n\n" + "\n".join(lines) + note + "\n"


# -- CSV ---------------------------------------------------------------------------------------------------------------


def csv_text(columns: list[str], rows: Iterable[dict[str, Any]]) -> str:
    """Rows under these columns; what is missing is empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(map(_cell, columns))
    writer.writerows([_cell(row.get(column)) for column in columns] for row in rows)
    return out.getvalue()


def _cell(value: Any) -> Any:
    """Numbers as they are; a text that a spreadsheet would take for a formula gets a `'` before it."""
    if value is None or isinstance(value, bool | int | float):
        return value
    text = one_line(str(value))
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
