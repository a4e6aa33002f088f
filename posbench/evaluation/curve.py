"""The extrapolation curve of one run, drawn in the terminal with its numbers."""

import itertools
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from posbench.evaluation import intervals
from posbench.runs.folder import load_config
from posbench.runs.rows import EvaluationRow, evaluation_blocks, evaluation_rows
from posbench.terminal import console, tables

HEIGHT = 12
WIDTH = 66  # characters of the chart at most
COLUMN = 14  # and between two lengths
# name -> (mark, mark without Unicode, style); the colours are told apart by the colour-blind, too
SERIES = {
    "fixed_target": ("●", "o", "bright_blue"),
    "windowed": ("○", "w", "yellow"),
    "nonoverlap": ("◇", "x", "bright_black"),
}


def print_curves(folder: Path) -> None:
    """Print a run's table and curve to stdout, and where everything lies."""
    out = console.stdout()
    plain = not console.carries_unicode(out)
    config = load_config(folder)
    rows = evaluation_rows(folder)
    title = f"{config.encoding.name}, seed {config.seed}: trained at {config.training.train_length} tokens"
    out.print(_table(rows, title, out))
    for line in _not_learned(rows):
        out.print(line)
    series = {name: _points(rows, name) for name in SERIES}
    if any(len(points) > 1 for points in series.values()):
        out.print(_draw({name: points for name, points in series.items() if points}, plain))
    if others := _others(rows):
        out.print(_others_table(others, out))
    if any(row.documents == "concat" for row in rows):
        out.print("Documents were too short to be scored whole: windows run across them.")
    for line in _about_intervals(folder, rows):
        out.print(line)
    out.print(f"Run folder: {folder}", soft_wrap=True)


def _not_learned(rows: list[EvaluationRow]) -> list[str]:
    """A line about a run that is no better at its training length than a bigram model, whose curve says nothing."""
    row = {row.length_ratio: row for row in rows if row.curve_name == "fixed_target"}.get(1.0)
    if row is None or row.nll is None or row.bigram_nll is None or row.nll < row.bigram_nll:
        return []
    others = f"a bigram model of the training tokens has {row.bigram_nll:.3f} on the same targets"
    return [f"Not learned: {row.nll:.3f} nats at 1x, {others}."]


def _about_intervals(folder: Path, rows: list[EvaluationRow]) -> list[str]:
    """What they are over, and whether that is little."""
    row = next((row for row in rows if row.measured and row.curve_name == "fixed_target"), None)
    if row is None:
        return []
    blocks = [block for block in evaluation_blocks(folder).get(row.blocks_key, []) if block.n_tokens]
    behind = intervals.documents_of(intervals.blocks_of(blocks)) if blocks else None
    if behind is None:
        return ["95 %: over blocks of unknown documents, which is too narrow; 'posbench evaluate' makes it anew."]
    usual = f"95 %: over {behind.number} documents, for this checkpoint on other text like this; not for other seeds."
    return [behind.warning or usual]


def _points(rows: list[EvaluationRow], name: str) -> dict[int, float]:
    own = [row for row in rows if row.status == "ok" and row.curve_name == name]
    return {row.length: row.nll for row in own if row.nll is not None}


def _table(rows: list[EvaluationRow], title: str, out: Console) -> Table:
    table = tables.table(out, title)
    table.add_column("context", no_wrap=True)
    for name in ("nll", "95 %", "perplexity", "bits/byte", "windowed", "nonoverlap"):
        table.add_column(name, justify="right", no_wrap=True)
    by_place = {(row.curve_name, row.length): row for row in rows if row.curve_name in SERIES}
    ratios = {row.length: row.length_ratio for row in by_place.values()}
    for length, ratio in sorted(ratios.items()):
        target, windowed, nonoverlap = (by_place.get((name, length)) for name in SERIES)
        table.add_row(
            f"{length} ({ratio:g}x)",
            _number(target),
            _interval(target),
            _number(target, "perplexity", 2),
            _number(target, "bits_per_byte"),
            _number(windowed),
            _number(nonoverlap),
        )
    table.caption = (
        "nats per token of the same target tokens at every context (fixed_target);\n"
        "windowed: those with attention narrowed to the training length; nonoverlap: whole windows"
    )
    return table


def _others(rows: list[EvaluationRow]) -> dict[str, dict[int, EvaluationRow]]:
    """What was evaluated beside the headline: extensions, probes, other protocols, by name and length."""
    by_name: dict[str, dict[int, EvaluationRow]] = {}
    for row in rows:
        if row.curve_name not in SERIES:
            by_name.setdefault(row.curve_name.removeprefix("fixed_target_"), {})[row.length] = row
    return by_name


def _others_table(others: dict[str, dict[int, EvaluationRow]], out: Console) -> Table:
    table = tables.table(out)
    lengths = sorted({length for by_length in others.values() for length in by_length})
    table.add_column("nll by context", no_wrap=True)
    for length in lengths:
        table.add_column(str(length), justify="right")
    for name, by_length in others.items():
        table.add_row(name, *(_number(by_length.get(length)) for length in lengths))
    return table


def _number(row: EvaluationRow | None, column: str = "nll", digits: int = 3) -> str:
    if row is None:
        return ""
    if row.status != "ok":
        return row.status if column == "nll" else ""
    value = getattr(row, column)
    return "" if value is None else f"{value:.{digits}f}"


def _interval(row: EvaluationRow | None) -> str:
    if row is None or row.ci_low is None or row.ci_high is None:
        return ""
    return f"{row.ci_low:.2f}..{row.ci_high:.2f}"


def _draw(series: dict[str, dict[int, float]], plain: bool) -> Text:
    lengths = sorted({length for points in series.values() for length in points})
    column = min(COLUMN, WIDTH // max(1, len(lengths) - 1))
    values = [value for points in series.values() for value in points.values()]
    low, high = min(values), max(values)
    span = max(high - low, 0.05)  # a flat curve shall look flat, not like noise blown up
    low = (low + high - span) / 2
    grid: dict[tuple[int, int], tuple[str, str]] = {}
    for name in reversed(SERIES):  # the headline is drawn last, over the others
        points = series.get(name, {})
        mark = SERIES[name][1 if plain else 0]
        places = [
            (lengths.index(c) * column, round((v - low) / span * (HEIGHT - 1))) for c, v in sorted(points.items())
        ]
        for (x0, y0), (x1, y1) in itertools.pairwise(places):
            for x in range(x0 + 1, x1):
                y = round(y0 + (y1 - y0) * (x - x0) / (x1 - x0))
                grid[x, y] = ("." if plain else "·", SERIES[name][2])
        for place in places:
            grid[place] = (mark, SERIES[name][2])
    return _render(grid, lengths, column, low, span, series, plain)


def _render(
    grid: dict[tuple[int, int], tuple[str, str]],
    lengths: list[int],
    column: int,
    low: float,
    span: float,
    series: dict[str, dict[int, float]],
    plain: bool,
) -> Text:
    text = Text("nats per token\n")
    for y in reversed(range(HEIGHT)):
        label = f"{low + span * y / (HEIGHT - 1):7.3f} " if y % 3 == 0 or y == HEIGHT - 1 else " " * 8
        text.append(label + ("| " if plain else "│ "))
        for x in range((len(lengths) - 1) * column + 1):
            text.append(*grid.get((x, y), (" ", "")))
        text.append("\n")
    text.append(" " * 10 + "".join(f"{length:<{column}}" for length in lengths).rstrip() + "\n")
    text.append(" " * 10 + "tokens of context    ")
    for name in series:
        text.append(f"{SERIES[name][1 if plain else 0]} {name}   ", SERIES[name][2])
    return text
