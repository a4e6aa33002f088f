"""The figures of a report: curves by context, differences from the reference, and of a task accuracies by length."""

import io
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

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
    """Return a figure as SVG within a page: a decimal of a point, the page's font, no ids that nothing uses."""
    svg = drawn(figure, "svg").decode()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.find("<svg") :], flags=re.DOTALL)
    used = set(re.findall(r"#([\w-]+)[\")]", svg))

    def shorten(tag: re.Match[str]) -> str:
        text = re.sub(r" id=\"(?!curve-)([^\"]*)\"", lambda name: name[0] if name[1] in used else "", tag[0])
        text = re.sub(
            r"(font-family|stroke-linecap):[^;\"]*;? ?|text-anchor: start;? ?| transform=\"rotate\(-0 .*?\"", "", text
        )
        text = re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), text)
        return re.sub(r"(?<=[;:MLQCz]) | (?=[MLQCz\"])", "", re.sub(r"\s+", " ", text))

    svg, groups = re.sub(r">\s+<", "><", re.sub(r"<[^>]*>", shorten, svg)), 1
    while groups:  # that have no name
        svg, groups = re.subn(r"<g>((?:(?!</?g[ >]).)*)</g>", r"\1", svg)
    return svg


def save(figure: Figure, folder: Path, name: str) -> None:
    """Write a figure as PNG and PDF."""
    for kind in ("png", "pdf"):
        files.write(folder / f"{name}.{kind}", drawn(figure, kind))


def of_runs(frame: pd.DataFrame, reference: str | None = None) -> Picture:
    """Draw runs that may be compared: the curves of text, or the accuracies of a task.

    Raises:
        UserError: they may not be compared, none of them has ended or was evaluated, or none is of the reference.
    """
    if frame["setting"].nunique() > 1:
        tasks_ = sorted({task or "none, text" for task in frame["trained_task"]})
        values = {"task": tasks_} if len(tasks_) > 1 else {}
        for settings in differing_settings(frame).values() if not values else ():
            for key, value in settings.items():
                values.setdefault(key, []).append(value)
        apart = "; ".join(f"{key}: {' or '.join(dict.fromkeys(each))}" for key, each in values.items())
        raise UserError(f"these runs may not be compared, they differ in {apart}: plot those of one kind")
    table = compare.compare(frame, reference)
    if frame["trained_task"].notna().any():
        figure, needed = of_task(frame), "tested on its problems"
    else:
        figure, needed = of_text(frame, table), "evaluated with fixed_target"
    if figure is None:
        raise UserError(f"nothing to plot: expected a run that has ended and was {needed}")
    return figure


# -- text --------------------------------------------------------------------------------------------------------------


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
    if kind == "perplexity":
        points[["nll", "nll_low", "nll_high"]] = np.exp(points[["nll", "nll_low", "nll_high"]].astype("float64"))
        table = table.assign(**{reader: np.exp(table[reader].astype("float64")) for reader in compare.READER_NAMES})
    base, only_one = table.attrs["reference"], kind != "panels"
    by_loss = list(table.loc[table["nll"].notna(), "label"])
    chosen = [label for label in by_loss if label != base][: MOST_NAMED - (base is not None)]
    named = [label for label in by_loss if label in (*chosen, base)]
    colours = {label: COLOURS[at] for at, label in enumerate(sorted(named))}
    width = 3.5 if only_one else 11.0
    with matplotlib.rc_context(STYLE):
        against = base is not None and len(named) > 1 and not only_one
        beyond = not only_one and points["length"].nunique() > 1
        figure = Picture(figsize=(width, 2.7 if only_one else 3.9), layout="constrained")
        shares = [1.25, *([1.0] if beyond else []), *([0.9] if against else [])]
        first, *others = figure.subplots(1, len(shares), width_ratios=shares, squeeze=False)[0]
        _curves(first, points, "nll", colours, table, base, only_one)
        first.set(
            title="" if only_one else "Loss", ylabel="perplexity" if kind == "perplexity" else "loss, nats per token"
        )
        if beyond:
            plain = points[points["variant"] == PLAIN]
            _curves(others[0], plain, "rise", colours, table, None)
            others[0].set(title="Change from the training length", ylabel="nats per token")
        if against:
            _differences(others[-1], table, [label for label in named if label != base], colours)
    return figure


def _curves(
    axes: Axes,
    points: pd.DataFrame,
    value: str,
    colours: Mapping[str, str],
    table: pd.DataFrame,
    windowed: str | None,
    only_one: bool = False,
) -> None:
    """Draw a curve for each scheme with its band, its name at the end, and the n-gram model as a grey line."""
    curves = points[(points["variant"] == PLAIN) | ((points["variant"] == WINDOWED) & (points["label"] == windowed))]
    ends = []
    for (label, variant), curve in curves.sort_values("length").groupby(["label", "variant"]):
        colour, group = colours.get(label, LIGHT), f"curve-{label}"
        dashed = variant != PLAIN
        style: dict[str, Any] = {"ls": (0, (4, 2))} if dashed else {}
        front = 2 + (label in colours)
        axes.plot(
            curve["length"], curve[value], color=DARK if dashed else colour, lw=1.7 if label in colours else 0.8,
            gid=group, zorder=front, marker="o" if len(curve) == 1 else "", ms=4, **style,
        )  # fmt: skip
        if label in colours and not dashed:
            low, high = curve[f"{value}_low"], curve[f"{value}_high"]
            axes.fill_between(curve["length"], low, high, color=colour, alpha=0.15, lw=0, gid=group)
        if label in colours and value == "nll":
            name = cut(str(label), LONGEST_NAME) + (f", {WINDOWED}" if dashed else "")
            ends.append((name, DARK if dashed else colour, curve["length"].iloc[-1], curve[value].iloc[-1], group))
    low, high = _within(curves[value])
    for reader, name in compare.READER_NAMES.items() if value == "nll" else ():
        if table[reader].notna().any():
            loss = float(table[reader].median())
            axes.axhline(loss, color=GREY, lw=1, zorder=1)
            ends.append((name, GREY, curves["length"].max(), loss, reader))
            low, high = min(low, loss), max(high, loss)
    axes.set_ylim(low - 0.04 * (high - low), high + 0.04 * (high - low))
    axes.axvline(table.attrs["train_length"], color=DARK, ls=":", lw=1)
    _name_ends(axes, ends, (high - low) / (10 if only_one else 18))
    _ticks(axes, sorted(points["length"].unique()), table.attrs["train_length"])
    axes.set_xlabel("context in tokens (dotted: training length)" if value == "nll" else "context in tokens")


def _within(values: pd.Series) -> tuple[float, float]:
    """Return the range to show: all values, but not what lies far above most of them."""
    low, high = float(values.min()), float(values.max())
    usual = float(values.quantile(0.9))
    high = min(high, usual + 1.5 * (usual - low)) if usual > low else high
    return (low, high) if high > low else (low - 0.1, high + 0.1)


def _name_ends(axes: Axes, ends: Sequence[tuple[str, str, float, float, str]], gap: float) -> None:
    """Write names right of the panel at the ends of their curves, pushed apart where they would collide."""
    ends = sorted(ends, key=lambda end: end[3])
    low, high = axes.get_ylim()
    at = np.clip([end[3] for end in ends], low, high)
    for _ in range(300):
        close = np.maximum(0, gap - np.diff(at)) / 2
        if close.max(initial=0) < 1e-6 * gap:
            break
        at[:-1] -= close
        at[1:] += close
    at += max(0.0, low - at.min(initial=low))  # not among the ticks below
    for (name, colour, length, value, group), height in zip(ends, at, strict=True):
        axes.annotate(
            name, (length, min(value, high)), xytext=(1.04, height), textcoords=axes.get_yaxis_transform(), va="center",
            color=colour, annotation_clip=False, fontsize=8, gid=group,
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.5, "relpos": (0, 0.5), "shrinkA": 1, "shrinkB": 1},
        )  # fmt: skip


def _ticks(axes: Axes, lengths: Sequence[int], train_length: int) -> None:
    """Put ticks at doublings of the training length, so few that they do not collide."""
    doublings = [length for length in lengths if float(np.log2(length / train_length)).is_integer()] or list(lengths)
    step = -(-len(doublings) // MOST_TICKS)
    at = doublings.index(train_length) % step if train_length in doublings else 0
    shown = doublings[at::step]
    axes.set_xscale("log", base=2)
    axes.set_xticks(shown, [f"{n // 1024}k" if n % 1024 == 0 and n >= 8192 else f"{n}" for n in shown])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(x=0.02)


def _differences(axes: Axes, table: pd.DataFrame, labels: Sequence[str], colours: Mapping[str, str]) -> None:
    """Draw each difference of the loss at the training length from the reference, with its adjusted interval."""
    rows = table[table["label"].isin(labels)].iloc[::-1]
    for place, row in enumerate(rows.to_dict("records")):
        ends = [row[f"nll_difference_adjusted_{end}"] for end in ("low", "high")]
        colour, group = colours[row["label"]], f"curve-{row['label']}"
        axes.plot(ends, [place, place], color=colour, lw=2, gid=group)
        axes.plot(row["nll_difference"], place, "o", color=colour, ms=4.5, gid=group)
    axes.axvline(0, color=DARK, lw=0.8)
    axes.set_yticks(range(len(rows)), [cut(str(label), LONGEST_NAME) for label in rows["label"]])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.grid(axis="y", visible=False)
    axes.locator_params(axis="x", nbins=5)
    base = cut(table.attrs["reference"], LONGEST_NAME)
    axes.set(title=f"Loss above {base}", xlabel="nats per token, adjusted 95 %")


# -- tasks -------------------------------------------------------------------------------------------------------------


def of_task(frame: pd.DataFrame) -> Picture | None:
    """Draw the schemes of one setting on a task: accuracy by length of the problems, median and range of seeds."""
    places = tasks.accuracies(frame)
    if not len(places):
        return None
    places = places[places["as_trained"] & (places["status"] == "ok")]
    far = places[places["length_ratio"] > 1].groupby("label")["accuracy"].mean().sort_values(ascending=False)
    labels = list(dict.fromkeys([*far.index, *places["label"]]))
    with matplotlib.rc_context(STYLE):
        figure = Picture(figsize=(6.4, 3.9), layout="constrained")
        axes = figure.subplots()
        ends = []
        for label, colour in zip(labels, itertools.chain(COLOURS, itertools.repeat(LIGHT)), strict=False):
            curve, group = places[places["label"] == label].sort_values("length_ratio"), f"curve-{label}"
            axes.plot(curve["length_ratio"], curve["accuracy"], color=colour, lw=1.7, marker="o", ms=3, gid=group)
            low, high = curve["accuracy_min"], curve["accuracy_max"]
            if colour != LIGHT:
                axes.fill_between(curve["length_ratio"], low, high, color=colour, alpha=0.1, lw=0, gid=group)
                last = curve.iloc[-1]
                ends.append((cut(str(label), LONGEST_NAME), colour, last["length_ratio"], last["accuracy"], group))
        trivial = places.groupby("length_ratio")["trivial"].median().dropna()
        if len(trivial):
            axes.plot(trivial.index, trivial, color=GREY, lw=1)
            ends.append(("trivial reader", GREY, trivial.index[-1], trivial.iloc[-1], "trivial"))
        axes.set_ylim(-0.03, 1.03)
        _name_ends(axes, ends, 0.055)
        shown = sorted(places["length_ratio"].unique())
        axes.set_xscale("log", base=2)
        doublings = [ratio for ratio in shown if float(np.log2(ratio)).is_integer()]
        axes.set_xticks(doublings, [f"{ratio:g}x" for ratio in doublings])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set(xlabel="length of the problems / longest trained", ylabel="share of right tokens (median of seeds)")
    return figure
