"""One definition of a table, four outputs: terminal, HTML, LaTeX, CSV."""

import dataclasses
import textwrap
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import pandas as pd
from rich.console import Console
from rich.text import Text

from posbench.terminal import console as terminal

Row = Mapping[str, Any]  # a row of the frame behind a table
# Characters of a table that are written differently in LaTeX.
_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "&": r"\&",
        "%": r"\%",
        "$": r"\$",
        "#": r"\#",
        "_": r"\_",
        "{": r"\{",
        "}": r"\}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        "±": r"$\pm$",
        "≥": r"$\geq$",
    }
)


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table."""

    name: str  # unique in its table
    head: str
    # a value's format, as `.3f`, or a function from row and name to text
    cell: str | Callable[[Row, str], str] = ""
    # a narrow terminal leaves out the column with the highest number first; 0: it
    # always stays
    spare: int = 0
    text: bool = False  # aligned to the left
    of: str = ""  # the frame's column; empty: `name`
    best: bool = False  # the lowest value is bold
    note: str = ""  # what it means, for the legend

    def shown(self, row: Row) -> str:
        """Return the column's text for a row."""
        name = self.of or self.name
        return (
            number(row, name, self.cell)
            if isinstance(self.cell, str)
            else self.cell(row, name)
        )


def number(row: Row, name: str, form: str = ".3f") -> str:
    """Return a value as text; empty where there is none."""
    value = row.get(name)
    return "" if value is None or pd.isna(value) else format(value, form)


class Table:
    """Rows of a frame under those columns that are not empty, with a title above and
    lines that explain them below.
    """

    def __init__(
        self,
        title: str,
        frame: pd.DataFrame,
        columns: Sequence[Column],
        legend: str = "",
        marks: Mapping[str, str] | None = None,
    ) -> None:
        records = frame.to_dict("records")
        texts = {column: [column.shown(row) for row in records] for column in columns}
        self.title, self.frame, self.legend, self.marks = (
            title,
            frame,
            legend,
            marks or {},
        )
        self.columns = [
            column for column in columns if column is columns[0] or any(texts[column])
        ]
        # the text of each, by row
        self.cells = [*zip(*(texts[column] for column in self.columns), strict=True)]

    @property
    def notes(self) -> str:
        """The notes of the columns, the marks that occur, and the legend, in one
        sentence.
        """
        texts = " ".join(text for row in self.cells for text in row[1:])
        marks = [
            f"{mark}: {meaning}"
            for mark, meaning in self.marks.items()
            if mark in texts
        ]
        joined = "; ".join(
            note
            for note in [*(c.note for c in self.columns), *marks, self.legend]
            if note
        )
        return f"{joined}." if joined else ""

    def rows(self, write: Callable[[str, bool], Any]) -> list[list[Any]]:
        """Return the cells; `write` makes each from its text and whether it is to stand
        out as its column's lowest.
        """
        best = [
            int(self.frame[c.of or c.name].argmin()) if c.best else None
            for c in self.columns
        ]
        pairs = [zip(row, best, strict=True) for row in self.cells]
        return [
            [write(text, i == lowest) for text, lowest in row]
            for i, row in enumerate(pairs)
        ]

    def print(self, console: Console, most_rows: int | None = None) -> None:
        """Print as many columns as fit and the first rows, and the lines that explain
        what is there.
        """
        columns = self.columns
        cells = zip(
            (column.head for column in columns), *self.cells[:most_rows], strict=True
        )
        widths = [max(len(Text(cell)) for cell in column) for column in cells]
        spare = sorted(
            (i for i, c in enumerate(columns) if c.spare),
            key=lambda i: -columns[i].spare,
        )
        fits = terminal.fitting_columns(widths, spare, console.width)
        hidden = ", ".join(
            c.head for i, c in enumerate(columns) if c.head and i not in fits
        )
        fitted = Table(
            self.title,
            self.frame.iloc[:most_rows],
            [columns[i] for i in fits],
            self.legend,
            self.marks,
        )
        table, left_out = terminal.table(), len(self.frame) - len(fitted.frame)
        for column in fitted.columns:
            table.add_column(
                Text(column.head),
                justify="left" if column.text else "right",
                no_wrap=True,
            )
        for row in fitted.rows(lambda words, best: Text(words, "bold" if best else "")):
            table.add_row(*row)
        remark = (
            f"{left_out} more are in the page and in table.csv. " if left_out else ""
        )
        remark += f"Left out at this width: {hidden}." if hidden else ""
        # lines end between notes
        unbroken = fitted.notes.replace(" ", "\xa0").replace(";\xa0", "; ")
        notes = "\n".join(
            textwrap.wrap(unbroken, console.width, break_long_words=False)
        ).replace("\xa0", " ")
        for part, style in (
            (Text(self.title), "bold"),
            (table, ""),
            (Text(remark), "dim"),
            (Text(notes), "dim"),
        ):
            if part:
                console.print(part, style=style)

    def html(self) -> str:
        """Return the table as HTML, in a box that scrolls."""
        sides = [
            " class=t" if column.text and i else ""
            for i, column in enumerate(self.columns)
        ]
        cells = self.rows(
            lambda text, best: f"<b>{escape(text)}</b>" if best else escape(text)
        )
        rows = [
            [f"<td{side}>{cell}" for side, cell in zip(sides, row, strict=True)]
            for row in cells
        ]
        heads = "".join(
            f"<th{side}>{escape(c.head)}"
            for side, c in zip(sides, self.columns, strict=True)
        )
        body = "\n".join(f"<tr>{''.join(row)}" for row in rows)
        note = f'<p class="note">{escape(self.notes)}</p>' if self.notes else ""
        table = f"<table><thead><tr>{heads}<tbody>\n{body}\n</table>"
        return f'<div class="scroll">{table}</div>{note}'

    def latex(self, label: str) -> str:
        """Return the table as LaTeX that needs booktabs."""
        sides = "".join("l" if column.text else "r" for column in self.columns)
        rows = self.rows(
            lambda text, best: rf"\textbf{{{_latex(text)}}}" if best else _latex(text)
        )
        lines = [
            r"% \usepackage{booktabs}",
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_latex(': '.join(filter(None, [self.title, self.notes])))}}}",
            rf"\label{{tab:{label}}}",
            rf"\begin{{tabular}}{{{sides}}}",
            r"\toprule",
            rf"{' & '.join(_latex(c.head) for c in self.columns)} \\",
            r"\midrule",
            *(rf"{' & '.join(row)} \\" for row in rows),
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
        return "\n".join(lines) + "\n"


def csv_text(frame: pd.DataFrame) -> str:
    """Return a frame as CSV."""
    return str(frame.to_csv(index=False, float_format="%.6g", lineterminator="\n"))


def _latex(text: str) -> str:
    return " ".join(text.split()).translate(_LATEX)
