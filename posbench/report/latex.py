"""The table for a paper: chosen columns, one page column wide; a comment above it names its data."""

import dataclasses
import re
import textwrap
from collections.abc import Callable, Collection
from typing import Literal

from posbench.errors import UserError, did_you_mean
from posbench.evaluation.intervals import Interval
from posbench.evaluation.levels import REACH_LIMIT, USES_LIMIT
from posbench.report import tables
from posbench.report.comparison import judgement, summary
from posbench.report.comparison.load import Group
from posbench.report.comparison.statistics import SEEDS_FOR_A_CLAIM
from posbench.report.comparison.summary import PerRun, Point, Summary
from posbench.report.tables import FEW, ONE, Table, Value
from posbench.run_folder.rows import PLAIN

TIMES = "\N{MULTIPLICATION SIGN}"
COLUMN = 219.0  # points: a narrow column among the usual two-column styles
CHARACTER, SEPARATION = 4.3, 3.0  # points: a character in \footnotesize; half the space between columns
DEFAULT = "nll_1x,rise_4x,rise_16x,reach"
_AT_RATIO = re.compile(r"(nll|rise)_(\d{1,6}(?:\.\d{1,6})?)x")
_NUMBER = re.compile(r"(≥ |<|)([+-]?[\d.,]+)(x?)(?: ±([\d.]+))?(.*)")
_MULTIPLE = re.compile(r"[\d.]+x\b")
_SPELT = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "#": r"\#", "$": r"\$", "%": r"\%", "&": r"\&", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "≥": r"$\geq$", "†": r"$^\dagger$",
    "‡": r"$^\ddagger$", "²": r"$^2$", "<": r"\textless{}", ">": r"\textgreater{}", TIMES: r"$\times$",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of the table: its head, its cells, and its sentence for the caption.

    `best`: a measure whose lowest value is best, or "farthest" for the longest reach; None: nothing in bold.
    """

    head: str
    cell: Callable[[Summary], Value]
    meaning: str = ""
    best: PerRun | Literal["farthest"] | None = None


_UNRANKED = {"no": "not learned", "not resolved": "learned: not resolved"}
_REFERENCE = "<reference>"  # placeholder for its label
_AGAINST = f"against {_REFERENCE}: paired by seed and target"
_NAMED = {
    "runs": Column("runs", tables.runs_ended),
    "parameters": Column("params", lambda one: tables.short(tables.parameters(one, "total"))),
    "encoding_parameters": Column("PE params", lambda one: tables.short(tables.parameters(one, "encoding"))),
    "perplexity": Column("ppl", tables.perplexity, "ppl: exp(nll)"),
    "bits_per_byte": Column("bits/byte", lambda one: tables.decimal(one.bits_per_byte)),
    "sd_seeds": Column("SD", lambda one: tables.decimal(tables.sd_of_seeds(one.nll_on_text)), "SD: of nll, of a seed"),
    "reach": Column(
        "reach",
        tables.reach,
        f"reach: tokens of context to which the rise, by its upper joint bound, is at most {REACH_LIMIT:g} (?: not "
        "resolved whether farther)",
        "farthest",
    ),
    "uses": Column(
        "uses",
        lambda one: Value("" if one.uses is None else str(one.uses)),
        f"uses: shortest context within {USES_LIMIT:g} of that at the training length, by its upper bound",
    ),
    "against_nll_1x": Column(
        f"nll vs. {_REFERENCE}", lambda one: tables.signed(one.endpoints.nll if one.endpoints else None), _AGAINST
    ),
    "against_rise_4x": Column(
        f"rise vs. {_REFERENCE}", lambda one: tables.signed(one.endpoints.rise if one.endpoints else None), _AGAINST
    ),
    "verdict": Column(
        "verdict",
        lambda one: Value(one.endpoints.verdict.text if one.endpoints else ""),
        f"verdict: against {_REFERENCE}, by joint bounds",
    ),
    "tokens_per_second": Column("tokens/s", lambda one: tables.whole(one.tokens_per_second)),
    "learned": Column("learned", tables.learned, "learned: nll at 1x is below that of the best n-gram model"),
}


def check(names: str | None) -> None:
    """Raise UserError if a name of a comma-separated list is no column."""
    for name in _listed(names or DEFAULT):
        if name not in _NAMED and not _AT_RATIO.fullmatch(name):
            known = ["nll_1x", "rise_4x", *_NAMED]
            hint = did_you_mean(name, known) or ":"
            raise UserError(
                f"--columns has no '{name}'{hint} expected {', '.join(known)}; nll and rise at any multiple"
            )


def _listed(names: str) -> list[str]:
    return [name.strip() for name in names.split(",")]


def _column(name: str, group: Group) -> Column:
    if not (found := _AT_RATIO.fullmatch(name)):
        known, label = _NAMED[name], group.reference.label if group.reference else ""
        head, meaning = (text.replace(_REFERENCE, label) for text in (known.head, known.meaning))
        return dataclasses.replace(known, head=head, meaning=meaning)
    ratio = float(found[2])
    length = round(ratio * group.train_length)
    if found[1] == "nll":
        meaning = "nll: nats per token of the same targets at every length"
        return Column(f"nll {ratio:g}{TIMES}", lambda one: _level(one, ratio), meaning, summary.nll(PLAIN, length))
    meaning = f"rise: of nll above that at 1{TIMES}"
    return Column(
        f"rise {ratio:g}{TIMES}", lambda one: tables.rise(_point(one, ratio)), meaning, summary.rise(PLAIN, length)
    )


def _point(one: Summary, ratio: float) -> Point | None:
    return next((point for point in one.plain.points if point.ratio == ratio), None)


def _level(one: Summary, ratio: float) -> Value:
    point = _point(one, ratio)
    if point is None or point.status == "ok":
        return tables.decimal(point.nll if point else None)
    return tables.rise(point)  # the reason why there is none


def left_out(group: Group, summaries: list[Summary], names: str | None) -> list[str]:
    """A note on columns that were asked for and have no value in this group."""
    asked = [(name, _column(name, group)) for name in _listed(names)] if names else []
    empty = [name for name, column in asked if not any(column.cell(one).text for one in summaries)]
    if not empty:
        return []
    ratios = sorted({point.ratio for one in summaries for point in one.plain.points})
    known = ", ".join(f"{ratio:g}x" for ratio in ratios) or "no length"
    return [f"Not in table.tex, since no run here has a value for it: {', '.join(empty)}. Evaluated here: {known}."]


# -- the table ---------------------------------------------------------------------------------------------------------


def table(group: Group, summaries: list[Summary], names: str | None, title: str, behind: str) -> str:
    """The table of a group as the text of a file, without empty columns.

    Args:
        names: of columns, comma-separated, checked by `check`; None: `DEFAULT`.
        title: of the study, for the label.
        behind: the data behind the numbers, for a comment.
    """
    labels = [one.scheme.label + ("" if one.ranked else f" ({_UNRANKED[str(one.learned)]})") for one in summaries]
    columns = [_column(name, group) for name in _listed(names or DEFAULT)]
    found = [(column, [column.cell(one) for one in summaries]) for column in columns]
    shown = [(column, cells) for column, cells in found if any(value.text for value in cells)]
    bold = {(row, at) for at, (column, cells) in enumerate(shown, 1) for row in _best(column, cells, summaries)}
    rows = [[Value(label), *(cells[row] for _, cells in shown)] for row, label in enumerate(labels)]
    alike = len({one.n_done for one in summaries if one.n_done}) <= 1
    made = Table("", ["scheme", *(column.head for column, _ in shown)], rows)
    meanings = dict.fromkeys(column.meaning for column, _ in shown if column.meaning)
    caption = _caption(group, summaries, "; ".join(meanings), made, bool(bold), alike)
    return of_table(made, caption, title, behind, bold, alike)


def of_table(
    table: Table,
    caption: str,
    title: str,
    behind: str,
    bold: Collection[tuple[int, int]] = (),
    alike: bool = False,
) -> str:
    """A table of the report as the text of a file; its first column is the scheme.

    Args:
        bold: the row and column of the cells in bold, from 0.
        alike: whether all rows have as many seeds, so that no cell need say how many.
    """
    heads = [head.replace("x", TIMES, 1) if _MULTIPLE.match(head) else head for head in table.columns]
    alignment = "".join("r" if right else "l" for right in table.numeric[1:])
    words = [word for row in table.rows for word in row[0].text.split()]
    width = CHARACTER * max(map(len, words), default=0)
    width += sum(_width([heads[at], *(row[at].text for row in table.rows)]) for at in range(1, len(heads)))
    wide = "*" if width > COLUMN else ""
    lines = [
        *_comment(behind),
        rf"\begin{{table{wide}}}",
        r"  \centering\footnotesize\setlength{\tabcolsep}{3pt}",
        rf"  \caption{{{latex(caption)}}}",
        r"  \smallskip",
        rf"  \label{{tab:{re.sub(r'[^A-Za-z0-9]+', '-', title)}}}",
        rf"  \begin{{tabularx}}{{\linewidth}}{{@{{}}>{{\raggedright\arraybackslash}}X{alignment}@{{}}}}",
        r"    \toprule",
        "    " + " & ".join(map(latex, heads)) + r" \\",
        r"    \midrule",
        *(f"    {_row(number, row, bold, alike)}" + r" \\" for number, row in enumerate(table.rows)),
        r"    \bottomrule",
        r"  \end{tabularx}",
        rf"\end{{table{wide}}}",
    ]
    return "\n".join(lines) + "\n"


def _width(texts: list[str]) -> float:
    """The approximate set width of a column in points; the part after a ± is smaller."""
    return 2 * SEPARATION + max(CHARACTER * (len(text) - 0.3 * len(text.partition("±")[2])) for text in texts)


def _best(column: Column, cells: list[Value], summaries: list[Summary]) -> set[int]:
    """Rows of the best and of all that a paired interval does not tell from it; empty if that is unknown.

    Only learned schemes with enough seeds for a claim take part.
    """
    rows = [
        row
        for row, (one, value) in enumerate(zip(summaries, cells, strict=True))
        if one.ranked and one.n_done >= SEEDS_FOR_A_CLAIM and value.number is not None
    ]
    if column.best is None or not rows:
        return set()
    if column.best == "farthest":
        best = {row for row in rows if cells[row].number == max(cells[other].number or 0 for other in rows)}
    else:
        first = min(rows, key=lambda row: cells[row].number or 0)
        behind = {row: _behind(summaries[row], summaries[first], column.best) for row in rows if row != first}
        if None in behind.values():
            return set()
        best = {first} | {row for row, found in behind.items() if found and found.low <= 0}
    return best if len(best) < len(rows) else set()


def _behind(one: Summary, best: Summary, measure: PerRun) -> Interval | None:
    """How much higher a scheme's measure is than the best one's; None if they are not paired."""
    return judgement.interval(summary.paired(one.scheme, best.scheme, measure))


def _comment(behind: str) -> list[str]:
    said = "Needs \\usepackage{booktabs,tabularx}. As wide as a column; as table*, as wide as the page."
    return [f"% {line}" for text in (said, _ascii(behind)) for line in textwrap.wrap(text, 110)]


def _caption(group: Group, summaries: list[Summary], meanings: str, made: Table, has_bold: bool, alike: bool) -> str:
    """A short caption: the meaning of columns, intervals and bold."""
    seeds = sorted({one.n_done for one in summaries if one.n_done})
    several = f"{' to '.join(map(str, sorted({seeds[0], seeds[-1]})))} seeds" if seeds else "no run done"
    counted = "one seed" if seeds == [1] else several
    over = "documents, for these checkpoints only" if seeds == [1] else "seeds and documents"
    texts = [value.text for row in made.rows for value in row[1:]]
    sentences = [
        f"Trained at {group.train_length} tokens, {counted}; {meanings}.",
        f"±: half of a 95 % interval over {over}." if any("±" in text for text in texts) else "",
        "[lowest, highest]: range of seeds." if any("[" in text for text in texts) else "",
        f"{FEW}: fewer than {SEEDS_FOR_A_CLAIM} seeds, {ONE}: one checkpoint." if not alike else "",
        "Bold: the best, and what a paired 95 % interval does not tell from it." if has_bold else "",
    ]
    return " ".join(sentence for sentence in sentences if sentence)


# -- cells -------------------------------------------------------------------------------------------------------------


def _row(number: int, row: list[Value], bold: Collection[tuple[int, int]], alike: bool) -> str:
    cells = [_cell(value, (number, at) in bold, alike) for at, value in enumerate(row[1:], start=1)]
    ranges = [re.sub(r"(?<=\d)-(?=\d)", "--", cell).replace("$[", "$ [") for cell in cells]
    return " & ".join([latex(row[0].text), *ranges])


def _cell(value: Value, bold: bool, alike: bool) -> str:
    """A number in math, for a true minus, its half interval below the line; marks only where they differ by row."""
    text = value.text.translate({ord(FEW): None, ord(ONE): None}) if alike else value.text
    found = _NUMBER.fullmatch(text)
    if value.number is None or not found:
        return latex(text)
    least, digits, times, half, rest = found.groups()
    before = {"≥ ": r"\geq ", "<": "<", "": ""}[least]
    number = digits.replace(",", "{,}")
    after = (r"\times" if times else "") + (rf"_{{\pm {half}}}" if half else "")
    number = rf"\mathbf{{{number}}}" if bold else number
    return f"${before}{number}{after}$" + latex(rest)


def latex(text: str) -> str:
    """Text in one line, with special characters escaped; non-ASCII characters become `?`."""
    return _ascii("".join(_SPELT.get(character, character) for character in text))


def _ascii(text: str) -> str:
    return text.encode("ascii", errors="replace").decode()
