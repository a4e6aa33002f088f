"""Tables as text: in the terminal, Markdown and CSV. Names may be untrusted and are data everywhere."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.text import Text

from posbench import files
from posbench.report.tables import Table
from posbench.terminal import tables
from posbench.terminal.console import carries_unicode

LONGEST_NAME = 24  # longest name of a scheme that is kept on one line
_ASCII = str.maketrans({"±": "+-", "†": "'", "‡": '"', "≥": ">=", "²": "^2"})


def write(path: Path, text: str) -> None:
    """Replace a file atomically; characters that UTF-8 cannot hold are escaped."""
    files.write(path, text.encode("utf-8", "backslashreplace"))


# -- terminal ----------------------------------------------------------------------------------------------------------


def print_table(console: Console, table: Table) -> None:
    """Print a table without its note; a narrow console drops the least important columns and names them.

    Control characters are escaped and nothing is markup.
    """
    plain = not carries_unicode(console)
    widths = _widths(table, console.width)
    shown = tables.table(console, _safe(table.title, plain))
    for column, width in widths.items():
        justify: Literal["left", "right"] = "right" if table.numeric[column] else "left"
        shown.add_column(_safe(table.columns[column], plain), justify=justify, overflow="fold", width=width)
    for row in table.rows:
        shown.add_row(*(_safe(row[column].text, plain) for column in widths))
    console.print(shown)
    if left := [name for column, name in enumerate(table.columns) if column not in widths]:
        print_lines(console, [f"No room here for {', '.join(left)}: see report.md."])


def _widths(table: Table, room: int) -> dict[int, int]:
    """The columns shown, with widths: the minimum, plus a share of the rest in proportion to need.

    A cell with a number stays on one line, unless even the most important columns would not fit.
    """
    for whole in (True, False):
        least = [_least_width(table, column, whole) for column in range(len(table.columns))]
        widths = {column: least[column] for column in tables.fitting(least, table.spare, room)}
        left = room - sum(widths.values()) - tables.BORDER * (len(widths) + 1)
        if left >= 0:
            break
    lacking = {column: max(map(len, _texts(table, column))) - width for column, width in widths.items()}
    for _ in range(left):
        column = max(lacking, key=lambda one: lacking[one])
        if lacking[column] > 0:
            widths[column] += 1
            lacking[column] -= 1
    return widths


def _least_width(table: Table, column: int, whole: bool) -> int:
    """The width of a column: the longest name for the first, else the longest word (with `whole` number); bounded."""
    head, *cells = _texts(table, column)
    unbroken = [head, *cells] if column == 0 else cells if whole and table.numeric[column] else []
    words = [word for text in (head, *cells) for word in text.split()]
    return min(max(map(len, [*words, *unbroken]), default=1), LONGEST_NAME)


def _texts(table: Table, column: int) -> list[str]:
    # As ASCII: some signs are wider there.
    return [text.translate(_ASCII) for text in (table.columns[column], *(row[column].text for row in table.rows))]


def print_lines(console: Console, lines: Iterable[str]) -> None:
    """Print lines of text with control characters escaped."""
    for line in lines:
        console.print(_safe(line, not carries_unicode(console)))


def _safe(text: str, plain: bool = False) -> Text:
    return Text(text.translate(_ASCII) if plain else text)


# -- Markdown ----------------------------------------------------------------------------------------------------------


def markdown(text: str) -> str:
    """Text in one line, escaped for Markdown and HTML."""
    escaped = re.sub(r"([\\`*|\[\]~])", r"\\\1", " ".join(text.split()))
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def markdown_table(table: Table) -> str:
    rule = ["---:" if right else "---" for right in table.numeric]
    rows = [table.columns, *([value.text for value in row] for row in table.rows)]
    lines = ["| " + " | ".join(markdown(cell) for cell in row) + " |" for row in rows]
    lines.insert(1, "| " + " | ".join(rule) + " |")
    note = f"\n\n{markdown(table.note)}" if table.note else ""
    return f"### {markdown(table.title)}\n\n" + "\n".join(lines) + note + "\n"
