"""One definition of a table, four outputs: terminal, HTML, LaTeX, CSV."""

import dataclasses
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
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
_MINUS = re.compile(r"(?<!\w)-(?=\d)")
_TIMES = re.compile(r"(?<=\d)x\b")


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

    @property
    def source(self) -> str:
        """The frame's column."""
        return self.of or self.name

    def cell_text(self, row: Row) -> str:
        """Return the column's text for a row."""
        if isinstance(self.cell, str):
            return number_text(row, self.source, self.cell)
        return self.cell(row, self.source)


def number_text(row: Row, name: str, form: str = ".3f") -> str:
    """Return a value of a row as text; empty where there is none."""
    return value_text(row.get(name), form)


def value_text(value: Any, form: str = ".3f") -> str:
    """Return a value as text; empty for None and NaN."""
    if value is None or pd.isna(value):
        return ""
    text = format(value, form)
    if re.fullmatch(r"[-+][0.]+", text):
        return text[1:]  # a number that is rounded to zero has no sign
    return text


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
        self.title = title
        self.frame = frame
        self.legend = legend
        self.marks = marks or {}
        self.columns: list[Column] = []

        records = frame.to_dict("records")
        by_column = []
        for column in columns:
            texts = [column.cell_text(row) for row in records]
            if column is columns[0] or any(texts):
                self.columns.append(column)
                by_column.append(texts)
        self.cells = [*zip(*by_column, strict=True)]  # the text of each, by row

    @property
    def notes(self) -> str:
        """The notes of the columns, the marks that occur, and the legend, in one
        sentence.
        """
        notes = [column.note for column in self.columns]
        texts = " ".join(text for row in self.cells for text in row[1:])
        for mark, meaning in self.marks.items():
            if mark in texts:
                notes.append(f"{mark}: {meaning}")
        notes.append(self.legend)

        joined = "; ".join(filter(None, notes))
        return f"{joined}." if joined else ""

    def rows(self, write: Callable[[str, bool], Any]) -> list[list[Any]]:
        """Return the cells; `write` makes each from its text and whether it is to stand
        out as its column's lowest.
        """
        lowest = [self._lowest(column) for column in self.columns]
        rows = []
        for place, texts in enumerate(self.cells):
            row = []
            for text, best in zip(texts, lowest, strict=True):
                row.append(write(text, place == best))
            rows.append(row)
        return rows

    def _lowest(self, column: Column) -> int | None:
        """Return the place of the column's lowest value; None: none stands out."""
        if not column.best:
            return None
        return int(self.frame[column.source].astype("float64").argmin())

    def print(self, console: Console, most_rows: int | None = None) -> None:
        """Print as many columns as fit and the first rows, and the lines that explain
        what is there.
        """
        places = self._fitting_places(console.width, most_rows)
        shown = Table(
            self.title,
            self.frame.iloc[:most_rows],
            [self.columns[place] for place in places],
            self.legend,
            self.marks,
        )
        table = terminal.table()
        for column in shown.columns:
            side: Any = "left" if column.text else "right"
            table.add_column(Text(column.head), justify=side, no_wrap=True)

        def cell(text: str, best: bool) -> Text:
            return Text(text, "bold" if best else "")

        for row in shown.rows(cell):
            table.add_row(*row)

        if self.title:
            console.print(Text(self.title), style="bold")
        console.print(table)
        n_hidden_rows = len(self.frame) - len(shown.frame)
        remark = self._hidden_text(n_hidden_rows, places)
        if remark:
            console.print(Text(remark), style="dim")

        # lines end between two notes where they can
        unbroken = shown.notes.replace(" ", "\xa0").replace(";\xa0", "; ")
        lines = textwrap.wrap(unbroken, console.width, break_long_words=False)
        if lines:
            notes = "\n".join(lines).replace("\xa0", " ")
            console.print(Text(notes), style="dim")

    def _fitting_places(self, width: int, most_rows: int | None) -> list[int]:
        """Return the places of the columns that fit, with the first rows."""
        heads = [column.head for column in self.columns]
        by_column = zip(heads, *self.cells[:most_rows], strict=True)
        widths = [max(len(Text(text)) for text in texts) for texts in by_column]

        spare = [place for place, column in enumerate(self.columns) if column.spare]
        spare.sort(key=lambda place: -self.columns[place].spare)
        return terminal.fitting_columns(widths, spare, width)

    def _hidden_text(self, n_rows: int, places: Sequence[int]) -> str:
        """Return what is not shown: so many rows, and the columns at other places."""
        remarks = []
        if n_rows:
            remarks.append(f"{n_rows} more are in the page and in table.csv.")
        heads = []
        for place, column in enumerate(self.columns):
            if column.head and place not in places:
                heads.append(column.head)
        if heads:
            remarks.append(f"Left out at this width: {', '.join(heads)}.")
        return " ".join(remarks)

    def html(self) -> str:
        """Return the table as HTML, in a box that scrolls."""
        sides = [" class=t" if column.text else "" for column in self.columns]
        sides[0] = ""  # the first column is always on the left

        heads = ""
        for side, column in zip(sides, self.columns, strict=True):
            heads += f"<th{side}>{escape(column.head)}"

        def cell(text: str, best: bool) -> str:
            return f"<b>{escape(text)}</b>" if best else escape(text)

        lines = []
        for row in self.rows(cell):
            line = "<tr>"
            for side, cell_html in zip(sides, row, strict=True):
                line += f"<td{side}>{cell_html}"
            lines.append(line)

        body = "\n".join(lines)
        table = f"<table><thead><tr>{heads}<tbody>\n{body}\n</table>"
        note = f'<p class="note">{escape(self.notes)}</p>' if self.notes else ""
        return f'<div class="scroll">{table}</div>{note}'

    def latex(self, label: str) -> str:
        """Return the table as LaTeX that needs booktabs."""
        sides = "".join("l" if column.text else "r" for column in self.columns)
        heads = [_latex_text(column.head) for column in self.columns]
        caption = ": ".join(filter(None, [self.title, self.notes]))
        lines = [
            r"% \usepackage{booktabs}",
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_latex_text(caption)}}}",
            rf"\label{{tab:{label}}}",
            rf"\begin{{tabular}}{{{sides}}}",
            r"\toprule",
            rf"{' & '.join(heads)} \\",
            r"\midrule",
        ]

        def cell(text: str, best: bool) -> str:
            return rf"\textbf{{{_latex_text(text)}}}" if best else _latex_text(text)

        for row in self.rows(cell):
            lines.append(rf"{' & '.join(row)} \\")
        lines += [r"\bottomrule", r"\end{tabular}", r"\end{table}"]
        return "\n".join(lines) + "\n"


def page_html(name: str, **values: Any) -> str:
    """Return a page of this folder's template, in the style of all pages. jinja escapes
    what a run folder holds.
    """
    import jinja2

    here = Path(__file__).parent
    template = jinja2.Template(
        (here / name).read_text("utf-8"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    style = (here / "page.css").read_text("utf-8")
    return str(template.render(style=style, **values))


def csv_text(frame: pd.DataFrame) -> str:
    """Return a frame as CSV."""
    return str(frame.to_csv(index=False, float_format="%.6g", lineterminator="\n"))


def _latex_text(text: str) -> str:
    text = " ".join(text.split()).translate(_LATEX)
    text = _MINUS.sub("$-$", text)
    return _TIMES.sub(r"$\\times$", text)
