"""One definition of a table, four outputs: terminal, HTML, LaTeX, CSV."""

import dataclasses
import functools
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

import pandas as pd
from rich.console import Console
from rich.text import Text

from posbench.terminal import console as terminal

Row = Mapping[str, Any]  # of the frame behind a table
Cell = str | Callable[[Row, str], str]
# Characters of a table that plain ASCII and LaTeX write otherwise.
_ASCII = str.maketrans({"±": "+/-", "≥": ">="})
_UNBROKEN = "\N{NO-BREAK SPACE}"
_LATEX = str.maketrans({
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "±": r"$\pm$", "≥": r"$\geq$",
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: tells it from the others, in `--columns`.
        head: what stands above it.
        cell: how a value is written, `.3f`, or what makes the text of a row and the name of the frame's column.
        spare: a narrow terminal leaves out the column with the highest number first; 0: it always stays.
        text: whether it is aligned to the left.
        of: the frame's column; empty: `name`.
        best: whether the lowest value is bold where a table can be.
        note: what it means, for the legend.
    """

    name: str
    head: str
    cell: Cell = ""
    spare: int = 0
    text: bool = False
    of: str = ""
    best: bool = False
    note: str = ""

    def shown(self, row: Row) -> str:
        """Return the text of a row."""
        name = self.of or self.name
        return number(row, name, self.cell) if isinstance(self.cell, str) else self.cell(row, name)


def number(row: Row, name: str, form: str = ".3f") -> str:
    """Return a value as text; empty where there is none."""
    value = row.get(name)
    return "" if value is None or pd.isna(value) else format(value, form)


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of a frame under columns, with a title above them and lines that explain them below."""

    title: str
    frame: pd.DataFrame
    columns: Sequence[Column]
    legend: str = ""
    marks: Mapping[str, str] = dataclasses.field(default_factory=dict)  # in cells, with their meanings

    @functools.cached_property
    def cells(self) -> list[list[str]]:
        """The text of every cell."""
        return [[column.shown(row) for column in self.columns] for row in self.frame.to_dict("records")]

    @property
    def notes(self) -> str:
        """The notes of the columns, the marks that occur, and the legend, in one sentence."""
        texts = [text for row in self.cells for text in row[1:]]
        notes = [column.note for column in self.columns]
        notes += [f"{mark}: {meaning}" for mark, meaning in self.marks.items() if any(mark in text for text in texts)]
        joined = "; ".join(note for note in [*notes, self.legend] if note)
        return f"{joined}." if joined else ""

    def filled(self) -> "Table":
        """Return the table without the columns that are empty in every row."""
        columns = [column for at, column in enumerate(self.columns) if at == 0 or any(row[at] for row in self.cells)]
        return dataclasses.replace(self, columns=columns)

    def selected(self, names: Iterable[str]) -> "Table":
        """Return the table with its first column and those of these names, in their order."""
        known = {column.name: column for column in self.columns[1:]}
        return dataclasses.replace(self, columns=[self.columns[0], *(known[name] for name in names if name in known)])

    def written(self, usual: Callable[[str], Any], best: Callable[[str], Any]) -> list[list[Any]]:
        """Return the cells as `usual` writes them, those with the lowest value of a column as `best` does."""
        lowest = [self.frame[c.of or c.name].min() if c.best else None for c in self.columns]
        rows = zip(self.cells, self.frame.to_dict("records"), strict=True)
        return [
            [
                best(text) if low is not None and row[column.of or column.name] == low else usual(text)
                for text, column, low in zip(texts, self.columns, lowest, strict=True)
            ]
            for texts, row in rows
        ]

    def print(self, console: Console, most_rows: int | None = None) -> None:
        """Print as many columns as fit and the first rows, and the lines that explain what is there."""
        signs = {} if terminal.carries_unicode(console) else _ASCII

        def text(words: str, style: str = "") -> Text:
            return Text(words.translate(signs), style=style)

        part = dataclasses.replace(self, frame=self.frame.iloc[:most_rows])
        heads = [column.head for column in self.columns]
        widths = [max(len(text(cell)) for cell in cells) for cells in zip(heads, *part.cells, strict=True)]
        spare = sorted((at for at, c in enumerate(self.columns) if c.spare), key=lambda at: -self.columns[at].spare)
        columns = [self.columns[at] for at in terminal.fitting(widths, spare, console.width)]
        shown, left_out = dataclasses.replace(part, columns=columns), len(self.frame) - len(part.frame)
        table = terminal.table(console)
        for column in columns:
            table.add_column(text(column.head), justify="left" if column.text else "right", no_wrap=True)
        for row in shown.written(text, functools.partial(text, style="bold")):
            table.add_row(*row)
        if self.title:
            console.print(text(self.title, "bold"))
        console.print(table)
        if left_out:
            console.print(text(f"{left_out} more are in the page and in table.csv.", "dim"))
        notes = shown.notes.replace(" ", _UNBROKEN).replace(f";{_UNBROKEN}", "; ")  # lines end between notes
        for line in textwrap.wrap(notes, console.width, break_long_words=False):
            console.print(text(line.replace(_UNBROKEN, " "), "dim"))

    def html(self) -> str:
        """Return the table as HTML, in a box that scrolls."""
        sides = [" class=t" if column.text and at else "" for at, column in enumerate(self.columns)]
        heads = "".join(f"<th{side}>{escape(c.head)}" for side, c in zip(sides, self.columns, strict=True))
        rows = [
            "".join(f"<td{side}>{cell}" for side, cell in zip(sides, cells, strict=True))
            for cells in self.written(escape, lambda text: f"<b>{escape(text)}</b>")
        ]
        body = "\n".join(f"<tr>{row}" for row in rows)
        note = f'<p class="note">{escape(self.notes)}</p>' if self.notes else ""
        return f'<div class="scroll"><table><thead><tr>{heads}<tbody>\n{body}\n</table></div>{note}'

    def latex(self, label: str) -> str:
        """Return the table as LaTeX that needs booktabs."""
        sides = "".join("l" if column.text else "r" for column in self.columns)
        heads = [_latex(column.head) for column in self.columns]
        rows = self.written(_latex, lambda text: rf"\textbf{{{_latex(text)}}}")
        caption = _latex(f"{self.title}. {self.notes}" if self.title else self.notes)
        lines = [
            r"% \usepackage{booktabs}", r"\begin{table}", r"\centering", rf"\caption{{{caption}}}",
            rf"\label{{tab:{label}}}", rf"\begin{{tabular}}{{{sides}}}", r"\toprule", rf"{' & '.join(heads)} \\",
            r"\midrule", *(rf"{' & '.join(row)} \\" for row in rows), r"\bottomrule", r"\end{tabular}", r"\end{table}",
        ]  # fmt: skip
        return "\n".join(lines) + "\n"

    def csv(self) -> str:
        """Return the frame behind the table as CSV, with all of its columns and digits."""
        return csv_text(self.frame)


def csv_text(frame: pd.DataFrame) -> str:
    """Return a frame as CSV."""
    text: str = frame.to_csv(index=False, float_format="%.6g", lineterminator="\n")
    return text


def _latex(text: str) -> str:
    return " ".join(text.split()).translate(_LATEX)
