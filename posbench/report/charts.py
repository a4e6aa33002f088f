"""The figures of a report: curves by context, differences from the reference, and of a task accuracies by length."""

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from posbench import files
from posbench.errors import UserError
from posbench.report.tables import cut
from posbench.results import compare, tasks
from posbench.results.compare import ENDPOINT_RATIO
from posbench.results.frame import differing_settings
from posbench.run.rows import PLAIN, WINDOWED

FigureKind = Literal["panels", "curve", "perplexity"]
DARK, GREY, LIGHT = "#333333", "#8C8C8C", "#C8C8C8"
# Of Okabe and Ito, which colour-blind readers tell apart, then darker ones for the rest.
COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#882255", "#8C6D1F", "#6A3D9A",
    "#4D9221", "#B2182B",
)  # fmt: skip
MOST_NAMED = len(COLOURS)
MOST_TICKS = 7
LONGEST_NAME = 20  # characters
STYLE: dict[Any, Any] = {
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "svg.fonttype": "none",
    "pdf.fonttype": 42,  # TrueType: conferences refuse matplotlib's Type 3
    "svg.hashsalt": "posbench",  # the same runs give the same file
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.7,
}
# What would tell two files of the same runs apart, by kind of file.
_UNDATED = {"png": ["Software"], "svg": ["Date", "Creator"], "pdf": ["CreationDate", "Creator", "Producer"]}


class Picture(Figure):
    """A figure that a notebook shows as a cell's value, with or without pyplot."""

    def _repr_png_(self) -> bytes:
        return drawn(self, "png")


def drawn(figure: Figure, kind: str) -> bytes:
    """Return a figure as png, pdf or svg, the same bytes each time."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format=kind, dpi=160, metadata=dict.fromkeys(_UNDATED[kind]))
    return buffer.getvalue()


def inline(figure: Figure) -> str:
    """Return a figure as SVG within a page, to a decimal of a point and in the page's font."""
    svg = re.sub(r"<metadata>.*?</metadata>|font-family:[^;\"]*;?", "", drawn(figure, "svg").decode(), flags=re.DOTALL)
    return re.sub(r"\d+\.\d{2,}(?![\d<])", lambda number: f"{float(number[0]):.1f}", svg[svg.find("<svg") :])


def save(figure: Figure, folder: Path, name: str) -> None:
    """Write a figure as PNG and PDF."""
    for kind in ("png", "pdf"):
        files.write(folder / f"{name}.{kind}", drawn(figure, kind))


def of_runs(frame: pd.DataFrame, reference: str | None = None) -> Picture:
    """Draw runs that may be compared: the curves of text, or the accuracies of a task.

    Raises:
        UserError: they may not be compared, none of them has ended or was evaluated, or none is of the reference.
    """
    of_tasks = frame["trained_task"].fillna("none, text")
    if frame["setting"].nunique() > 1:
        settings = (
            pd.DataFrame(differing_settings(frame).values()) if of_tasks.nunique() == 1 else of_tasks.to_frame("task")
        )
        apart = "; ".join(f"{key}: {' or '.join(sorted(values.unique()))}" for key, values in settings.items())
        raise UserError(f"these runs may not be compared, they differ in {apart}: plot those of one kind")
    table, of_task_ = compare.compare(frame, reference), frame["trained_task"].notna().any()
    figure = of_task(frame) if of_task_ else of_text(frame, table)
    if figure is None:
        needed = "tested on its problems" if of_task_ else "evaluated with fixed_target"
        raise UserError(f"nothing to plot: expected a run that has ended and was {needed}")
    return figure


def of_text(frame: pd.DataFrame, table: pd.DataFrame, kind: FigureKind = "panels") -> Picture | None:
    """Draw the schemes of one setting: loss by context, what context adds, and differences from the reference.

    At most `MOST_NAMED` schemes have a name and a colour, the reference and those with the lowest loss; others are
    grey.

    Args:
        frame: of one setting.
        table: of `results.compare.compare`.
        kind: `panels`, or the first of these panels alone, as wide as a column of a paper: `curve`, or `perplexity`.
    """
    if not table.attrs["schemes"]:
        return None
    points = compare.curves(frame)
    points = points[(points["status"] == "ok") & (points["ratio"] >= 1 / ENDPOINT_RATIO)]
    readers = {name: float(table[reader].median()) for reader, name in compare.READER_NAMES.items()}
    if kind == "perplexity":
        losses = ["nll", "nll_low", "nll_high"]
        points[losses], readers = np.exp(points[losses].astype("float64")), {n: np.exp(v) for n, v in readers.items()}
    base, by_loss = table.attrs["reference"], list(table.loc[table["nll"].notna(), "label"])
    chosen = [label for label in by_loss if label != base][: MOST_NAMED - (base is not None)]
    named = [label for label in by_loss if label in (*chosen, base)]
    colours = dict(zip(sorted(named), COLOURS, strict=False))
    plain, narrowed = points["variant"] == PLAIN, (points["variant"] == WINDOWED) & (points["label"] == base)
    beyond = kind == "panels" and points["length"].nunique() > 1
    against = kind == "panels" and base is not None and len(named) > 1
    with matplotlib.rc_context(STYLE):
        figure = Picture(figsize=(11.0, 3.9) if kind == "panels" else (3.5, 2.7), layout="constrained")
        shares = [1.25, *([1.0] if beyond else []), *([0.9] if against else [])]
        axes, *others = figure.subplots(1, len(shares), width_ratios=shares, squeeze=False)[0]
        ends = _curves(axes, points[plain | narrowed], "length", "nll", colours)
        ends += [_level(axes, name, loss) for name, loss in readers.items() if not np.isnan(loss)]
        _range(axes, points.loc[plain | narrowed, "nll"], [end.y for end in ends])
        _name_ends(axes, ends, 19 if kind == "panels" else 11)
        axes.set(title="Loss" if kind == "panels" else "", xlabel="context in tokens (dotted: training length)")
        axes.set_ylabel("perplexity" if kind == "perplexity" else "loss, nats per token")
        if beyond:
            _curves(others[0], points[plain], "length", "rise", colours)
            _range(others[0], points.loc[plain, "rise"])
            others[0].set(title="Change from the training length", xlabel="context in tokens", ylabel="nats per token")
        for panel in [axes, *others[:beyond]]:
            panel.axvline(table.attrs["train_length"], color=DARK, ls=":", lw=1)
            _ticks(panel, points["length"], table.attrs["train_length"])
        if against:
            _differences(others[-1], table[table["label"].isin(set(named) - {base})], colours)
    return figure


def of_task(frame: pd.DataFrame) -> Picture | None:
    """Draw the schemes of one setting on a task: accuracy by length of the problems, median and range of seeds."""
    places = tasks.accuracies(frame)
    if not len(places):
        return None
    points = places[places["as_trained"] & (places["status"] == "ok")]
    far = points[points["length_ratio"] > 1].groupby("label")["accuracy"].mean().sort_values(ascending=False)
    labels = dict.fromkeys([*far.index, *points["label"]])
    points = points.assign(accuracy_low=points["accuracy_min"], accuracy_high=points["accuracy_max"])
    with matplotlib.rc_context(STYLE):
        figure = Picture(figsize=(6.4, 3.9), layout="constrained")
        axes = figure.subplots()
        ends = _curves(axes, points, "length_ratio", "accuracy", dict(zip(labels, COLOURS, strict=False)))
        trivial = points.groupby("length_ratio")["trivial"].median().dropna()
        if len(trivial):
            axes.plot(trivial.index, trivial, color=GREY, lw=1)
            ends.append(End("trivial reader", GREY, trivial.index[-1], trivial.iloc[-1]))
        axes.set_ylim(-0.03, 1.03)
        _name_ends(axes, ends, 19)
        _ticks(axes, points["length_ratio"], 1, "x")
        axes.set(xlabel="length of the problems / longest trained", ylabel="share of right tokens (median of seeds)")
    return figure


# -- parts of a panel --------------------------------------------------------------------------------------------------


class End(NamedTuple):
    """Where a curve ends, and what is written there."""

    name: str
    colour: str
    x: float
    y: float
    group: str = ""  # of the SVG: the page brings out the curve below the pointer


def _curves(axes: Axes, points: pd.DataFrame, x: str, y: str, colours: Mapping[str, str]) -> list[End]:
    """Draw a curve with its band for each scheme and variant, and return the ends of those that have a colour."""
    ends = []
    for (label, variant), curve in points.sort_values(x).groupby(["label", "variant"]):
        narrowed, known, group = variant != PLAIN, label in colours, f"curve-{label}"
        colour = DARK if narrowed else colours.get(label, LIGHT)
        axes.plot(
            curve[x], curve[y], color=colour, lw=1.7 if known else 0.8, ls=(0, (4, 2)) if narrowed else "-", gid=group,
            zorder=2 + known, marker="o" if len(curve) == 1 or x != "length" else "", ms=3,
        )  # fmt: skip
        if known and not narrowed:
            axes.fill_between(
                curve[x], curve[f"{y}_low"], curve[f"{y}_high"], color=colour, alpha=0.13, lw=0, gid=group
            )
        if known:
            name = cut(label, LONGEST_NAME) + (f", {variant}" if narrowed else "")
            ends.append(End(name, colour, curve[x].iloc[-1], curve[y].iloc[-1], group))
    return ends


def _level(axes: Axes, name: str, value: float) -> End:
    """Draw a grey line across a panel and return its end."""
    axes.axhline(value, color=GREY, lw=1, zorder=1)
    return End(name, GREY, axes.dataLim.x1, value)


def _range(axes: Axes, values: pd.Series, others: Sequence[float] = ()) -> None:
    """Show all values and others, but no values that lie far above most of them."""
    usual, low, high = values.quantile(0.9), values.min(), values.max()
    high = min(high, usual + 1.5 * (usual - low)) if usual > low else high
    low, high = min([low, *others]), max([high, *others])
    margin = 0.04 * (high - low) or 0.1
    axes.set_ylim(low - margin, high + margin)


def _name_ends(axes: Axes, ends: Sequence[End], most: int) -> None:
    """Write names right of the panel at the ends of their curves, pushed apart where more than `most` would not fit."""
    ends, (low, high) = sorted(ends, key=lambda end: end.y), axes.get_ylim()
    at, gap = np.clip([end.y for end in ends], low, high), (high - low) / most
    for _ in range(300):
        close = np.maximum(0, gap - np.diff(at)) / 2
        if close.max(initial=0) < 1e-6 * gap:
            break
        at[:-1] -= close
        at[1:] += close
    at += max(0.0, low - at.min(initial=low))  # not among the ticks below
    for end, height in zip(ends, at, strict=True):
        axes.annotate(
            end.name, (end.x, min(end.y, high)), xytext=(1.04, height), textcoords=axes.get_yaxis_transform(),
            va="center", color=end.colour, annotation_clip=False, fontsize=8, gid=end.group, arrowprops={
                "arrowstyle": "-", "color": end.colour, "lw": 0.5, "relpos": (0, 0.5), "shrinkA": 1, "shrinkB": 1,
            },
        )  # fmt: skip


def _ticks(axes: Axes, values: pd.Series, base: float, unit: str = "") -> None:
    """Put ticks at doublings of a value, so few that they do not collide."""
    every = sorted(values.unique())
    doublings = [value for value in every if float(np.log2(value / base)).is_integer()] or every
    step = -(-len(doublings) // MOST_TICKS)
    shown = doublings[doublings.index(base) % step if base in doublings else 0 :: step]
    axes.set_xscale("log", base=2)
    axes.set_xticks(shown, [f"{n // 1024}k" if n % 1024 == 0 and n >= 8192 else f"{n:.6g}{unit}" for n in shown])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(x=0.02)


def _differences(axes: Axes, rows: pd.DataFrame, colours: Mapping[str, str]) -> None:
    """Draw each difference of the loss at the training length from the reference, with its adjusted interval."""
    for place, row in enumerate(rows.iloc[::-1].to_dict("records")):
        ends = [row[f"nll_difference_adjusted_{end}"] for end in ("low", "high")]
        colour, group = colours[row["label"]], f"curve-{row['label']}"
        axes.plot(ends, [place, place], color=colour, lw=2, gid=group)
        axes.plot(row["nll_difference"], place, "o", color=colour, ms=4.5, gid=group)
    axes.axvline(0, color=DARK, lw=0.8)
    axes.set_yticks(range(len(rows)), [cut(label, LONGEST_NAME) for label in rows["label"].iloc[::-1]])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.grid(axis="y", visible=False)
    axes.locator_params(axis="x", nbins=5)
    base = cut(rows.attrs["reference"], LONGEST_NAME)
    axes.set(title=f"Loss above {base}", xlabel="nats per token, adjusted 95 %")
