"""One definition of a table, four outputs: terminal, HTML, LaTeX, CSV."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

import pandas as pd
from rich.console import Console
from rich.text import Text

from posbench.terminal import console as terminal
from posbench.terminal.console import carries_unicode, fitting

Row = Mapping[str, Any]  # of the frame behind a table, as a mapping
# Characters of a table that plain ASCII and LaTeX write otherwise.
_ASCII = str.maketrans({"±": "+/-", "≥": ">="})
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
        cell: the text of a row.
        spare: a narrow terminal leaves out the column with the highest number first; 0: it always stays.
        text: whether it is aligned to the left.
        best: the column of the frame whose lowest value is bold where a table can be.
    """

    name: str
    head: str
    cell: Callable[[Row], str]
    spare: int = 0
    text: bool = False
    best: str = ""


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of a frame under columns, with a title above them and lines that explain them below."""

    title: str
    frame: pd.DataFrame
    columns: Sequence[Column]
    legend: "Sequence[str] | Callable[[Table], Sequence[str]]" = ()  # or what makes it of the table that is shown

    @functools.cached_property
    def cells(self) -> list[list[str]]:
        """The text of every cell."""
        return [[column.cell(row) for column in self.columns] for row in self.frame.to_dict("records")]

    @property
    def notes(self) -> Sequence[str]:
        """The lines of the legend."""
        return self.legend(self) if callable(self.legend) else self.legend

    def filled(self) -> "Table":
        """Return the table without the columns that are empty in every row."""
        columns = [column for at, column in enumerate(self.columns) if at == 0 or any(row[at] for row in self.cells)]
        return dataclasses.replace(self, columns=columns)

    def selected(self, names: Iterable[str]) -> "Table":
        """Return the table with its first column and those of these names, in their order."""
        known = {column.name: column for column in self.columns}
        chosen = [known[name] for name in names if name in known and name != self.columns[0].name]
        return dataclasses.replace(self, columns=[self.columns[0], *chosen])

    def _best(self) -> list[list[bool]]:
        """Tell which cells are bold."""
        lowest = [self.frame[column.best].min() if column.best in self.frame else None for column in self.columns]
        rows = self.frame.to_dict("records")
        pairs = list(zip(self.columns, lowest, strict=True))
        return [[least is not None and row[column.best] == least for column, least in pairs] for row in rows]

    def print(self, console: Console, most_rows: int | None = None) -> None:
        """Print as many columns as fit and the first rows, and the lines that explain what is there."""
        if most_rows is not None and most_rows < len(self.frame):
            part = dataclasses.replace(self, frame=self.frame.iloc[:most_rows])
            left = f"{len(self.frame) - most_rows} more are in the page and in table.csv."
            dataclasses.replace(
                part, legend=lambda shown: [left, *dataclasses.replace(shown, legend=self.legend).notes]
            ).print(console)
            return
        plain = not carries_unicode(console)
        heads, *rows = [[_plain(text, plain) for text in row] for row in [[c.head for c in self.columns], *self.cells]]
        widths = [max(map(len, texts)) for texts in zip(heads, *rows, strict=True)]
        spare = sorted((at for at, c in enumerate(self.columns) if c.spare), key=lambda at: -self.columns[at].spare)
        shown = fitting(widths, spare, console.width)
        table = terminal.table(console)
        for at in shown:
            table.add_column(heads[at], justify="left" if self.columns[at].text else "right", no_wrap=True)
        for row, best in zip(rows, self._best(), strict=True):
            table.add_row(*(Text(row[at], style="bold" if best[at] else "") for at in shown))
        if self.title:
            console.print(Text(_plain(self.title, plain), style="bold"))
        console.print(table)
        for line in dataclasses.replace(self, columns=[self.columns[at] for at in shown]).notes:
            console.print(Text(_plain(line, plain), style="dim"))

    def html(self) -> str:
        """Return the table as HTML, in a box that scrolls."""
        sides = [" class=t" if column.text and at else "" for at, column in enumerate(self.columns)]
        heads = "".join(f"<th{side}>{escape(c.head)}" for side, c in zip(sides, self.columns, strict=True))
        body = [
            "".join(
                f"<td{side}>{f'<b>{escape(text)}</b>' if bold else escape(text)}"
                for side, text, bold in zip(sides, texts, best, strict=True)
            )
            for texts, best in zip(self.cells, self._best(), strict=True)
        ]
        rows = "\n".join(f"<tr>{cells}" for cells in body)
        notes = "".join(f'<p class="note">{escape(line)}</p>' for line in self.notes)
        return f'<div class="scroll"><table><thead><tr>{heads}<tbody>\n{rows}\n</table></div>{notes}'

    def latex(self, label: str) -> str:
        """Return the table as LaTeX that needs booktabs."""
        sides = "".join("l" if column.text else "r" for column in self.columns)
        rows = [
            " & ".join(
                rf"\textbf{{{_latex(text)}}}" if bold else _latex(text) for text, bold in zip(*pair, strict=True)
            )
            for pair in zip(self.cells, self._best(), strict=True)
        ]
        heads = " & ".join(_latex(column.head) for column in self.columns)
        caption = _latex(" ".join([f"{self.title}.", *self.notes] if self.title else self.notes))
        lines = [
            r"% \usepackage{booktabs}", r"\begin{table}", r"\centering", rf"\caption{{{caption}}}",
            rf"\label{{tab:{label}}}", rf"\begin{{tabular}}{{{sides}}}", r"\toprule", rf"{heads} \\", r"\midrule",
            *(rf"{row} \\" for row in rows), r"\bottomrule", r"\end{tabular}", r"\end{table}",
        ]  # fmt: skip
        return "\n".join(lines) + "\n"

    def csv(self) -> str:
        """Return the frame behind the table as CSV, with all of its columns and digits."""
        return csv_text(self.frame)


def csv_text(frame: pd.DataFrame) -> str:
    """Return a frame as CSV."""
    text: str = frame.to_csv(index=False, float_format="%.6g", lineterminator="\n")
    return text


def _plain(text: str, plain: bool) -> str:
    return text.translate(_ASCII) if plain else text


def _latex(text: str) -> str:
    return " ".join(text.split()).translate(_LATEX)
