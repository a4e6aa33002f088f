"""The figures of a report: curves by context, differences from the reference, and for a
task accuracies by length.
"""

import io
import re
from collections.abc import Mapping
from typing import Any, Literal

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from posbench.errors import UserError
from posbench.reports.tables import cut
from posbench.results import compare, tasks
from posbench.results.compare import ENDPOINT_RATIO
from posbench.results.settings import differing_settings
from posbench.run.rows import PLAIN, WINDOWED

FigureKind = Literal["panels", "curve", "perplexity"]
DARK, GREY, LIGHT = "#333333", "#8C8C8C", "#C8C8C8"
# The colours of Okabe and Ito, which colour-blind readers can tell apart, and then
# darker ones.
COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#882255",
    "#8C6D1F",
    "#6A3D9A",
    "#4D9221",
    "#B2182B",
)
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
# Metadata in which two files of the same runs would differ, by kind of file.
_UNDATED = {
    "png": ["Software"],
    "svg": ["Date", "Creator"],
    "pdf": ["CreationDate", "Creator", "Producer"],
}


class Picture(Figure):
    """A figure that a notebook shows as a cell's value, with or without pyplot."""

    def _repr_png_(self) -> bytes:
        return drawn(self, "png")


def drawn(figure: Figure, kind: str) -> bytes:
    """Return a figure as png, pdf or svg, the same bytes each time."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(
            buffer, format=kind, dpi=160, metadata=dict.fromkeys(_UNDATED[kind])
        )
    return buffer.getvalue()


def inline(figure: Figure) -> str:
    """Return a figure as SVG for a page, in the page's font, with numbers rounded to a
    tenth of a point.
    """
    svg = re.sub(
        r"<metadata>.*?</metadata>|font-family:[^;\"]*;?",
        "",
        drawn(figure, "svg").decode(),
        flags=re.DOTALL,
    )
    return re.sub(
        r"\d+\.\d{2,}(?![\d<])",
        lambda number: f"{float(number[0]):.1f}",
        svg[svg.find("<svg") :],
    )


def of_runs(frame: pd.DataFrame, reference: str | None = None) -> Picture:
    """Draw runs: the curves of text, or the accuracies of a task; UserError if not
    comparable, or without results.
    """
    if frame["setting"].nunique() > 1:
        settings = pd.DataFrame(differing_settings(frame).values()).fillna("null")
        differences = "; ".join(
            f"{key}: {' or '.join(sorted(values.unique()))}"
            for key, values in settings.items()
        )
        raise UserError(
            f"these runs may not be compared, they differ in {differences}: plot those"
            " of one kind"
        )
    of_a_task = frame["trained_task"].notna().any()
    figure = (
        of_task(frame)
        if of_a_task
        else of_text(frame, compare.compare(frame, reference))
    )
    if figure is None:
        requirement = (
            "tested on its problems" if of_a_task else "evaluated with fixed_target"
        )
        raise UserError(
            f"nothing to plot: expected a run that has ended and was {requirement}"
        )
    return figure


def of_text(
    frame: pd.DataFrame, table: pd.DataFrame, kind: FigureKind = "panels"
) -> Picture | None:
    """Draw the schemes of one setting: loss by context, what context adds, and
    differences from the reference.

    At most `MOST_NAMED` schemes have a name and a colour, the reference and those with
    the lowest loss; others are grey. `curve` is the first panel alone, as wide as a
    column of a paper. None without any loss.
    """
    if not table.attrs["schemes"]:
        return None
    points, base, length = (
        compare.curves(frame),
        table.attrs["reference"],
        table.attrs["train_length"],
    )
    points = points[points["ratio"] >= 1 / ENDPOINT_RATIO]
    readers = {name: table[reader].median() for reader, name in compare.READERS.items()}
    if kind == "perplexity":
        losses = ["nll", "nll_low", "nll_high"]
        points[losses], readers = (
            np.exp(points[losses].astype("float64")),
            {n: np.exp(v) for n, v in readers.items()},
        )
    levels = {
        name: pd.Series(loss, [points["length"].min(), points["length"].max()])
        for name, loss in readers.items()
    }
    by_loss = table.loc[table["nll"].notna(), "label"]
    named = {
        *by_loss[by_loss != base][: MOST_NAMED - (base is not None)],
        *by_loss[by_loss == base],
    }
    colours = dict(zip(sorted(named), COLOURS, strict=False))
    plain, narrowed = (
        points["variant"] == PLAIN,
        (points["variant"] == WINDOWED) & (points["label"] == base),
    )
    panels = kind == "panels"
    has_rise, has_difference = (
        panels and points["length"].nunique() > 1,
        panels and "nll_difference" in table,
    )
    with matplotlib.rc_context(STYLE):
        figure = Picture(
            figsize=(11.0, 3.9) if panels else (3.5, 2.7), layout="constrained"
        )
        shares = [
            1.25,
            *([1.0] if has_rise else []),
            *([0.9] if has_difference else []),
        ]
        axes, *others = figure.subplots(
            1, len(shares), width_ratios=shares, squeeze=False
        )[0]
        _curves(
            axes,
            points[plain | narrowed],
            "length",
            "nll",
            colours,
            length,
            levels,
            19 if panels else 11,
        )
        axes.set(
            title="Loss" if panels else "",
            xlabel="context in tokens (dotted: training length)",
        )
        axes.set_ylabel(
            "perplexity" if kind == "perplexity" else "loss, nats per token"
        )
        if has_rise:
            _curves(others[0], points[plain], "length", "rise", colours, length)
            others[0].set(
                title="Change from the training length",
                xlabel="context in tokens",
                ylabel="nats per token",
            )
        if has_difference:
            _differences(
                others[-1], table[table["label"].isin(named - {base})], colours
            )
    return figure


def of_task(frame: pd.DataFrame) -> Picture | None:
    """Draw the schemes of one setting on a task: accuracy by problem length, as the
    median and range over seeds.
    """
    places = tasks.accuracies(frame)
    if not len(places):
        return None
    points = places[places["as_trained"] & (places["status"] == "ok")]
    accuracies = (
        points[points["length_ratio"] > 1]
        .groupby("label")["accuracy"]
        .mean()
        .sort_values(ascending=False)
    )
    colours = dict(
        zip(dict.fromkeys([*accuracies.index, *points["label"]]), COLOURS, strict=False)
    )
    points = points.rename(
        columns={"accuracy_min": "accuracy_low", "accuracy_max": "accuracy_high"}
    )
    trivial = {"trivial reader": points.groupby("length_ratio")["trivial"].median()}
    with matplotlib.rc_context(STYLE):
        figure = Picture(figsize=(6.4, 3.9), layout="constrained")
        axes = figure.subplots()
        _curves(axes, points, "length_ratio", "accuracy", colours, 1, trivial, 19, "x")
        axes.set(
            xlabel="length of the problems / longest trained",
            ylabel="share of right tokens (median of seeds)",
        )
    return figure


def _curves(
    axes: Axes,
    points: pd.DataFrame,
    x: str,
    y: str,
    colours: Mapping[str, str],
    base: float,
    levels: Mapping[str, pd.Series] | None = None,
    names: int = 0,
    unit: str = "",
) -> None:
    """Draw a curve with its band for each scheme and variant, grey levels, as many
    names as fit, ticks at doublings.
    """
    ends: list[tuple[float, float, str, str, str]] = []
    for (label, variant), curve in points.sort_values(x).groupby(["label", "variant"]):
        narrowed, named, group = variant != PLAIN, label in colours, f"curve-{label}"
        colour = DARK if narrowed else colours.get(label, LIGHT)
        axes.plot(
            curve[x],
            curve[y],
            color=colour,
            lw=1.7 if named else 0.8,
            ls=(0, (4, 2)) if narrowed else "-",
            gid=group,
            zorder=2 + named,
            marker="o" if len(curve) == 1 or x != "length" else "",
            ms=3,
        )
        if named and not narrowed:
            low, high = curve[f"{y}_low"], curve[f"{y}_high"]
            axes.fill_between(
                curve[x], low, high, color=colour, alpha=0.13, lw=0, gid=group
            )
        if named:
            name = cut(label, LONGEST_NAME) + (f", {variant}" if narrowed else "")
            ends.append((curve[y].iloc[-1], curve[x].iloc[-1], name, colour, group))
    for name, level in (
        (name, level.dropna()) for name, level in (levels or {}).items()
    ):
        if len(level):
            axes.plot(level.index, level, color=GREY, lw=1, zorder=1)
            ends.append((level.iloc[-1], level.index[-1], name, GREY, ""))
    low, usual, high = points[y].quantile([0, 0.9, 1])
    if usual > low:  # values far above most others are cut off
        high = min(high, usual + 1.5 * (usual - low))
    heights = [low, high, *(end[0] for end in ends if names)]
    margin = 0.04 * (max(heights) - min(heights)) or 0.1
    axes.set_ylim(
        (-0.03, 1.03)
        if y == "accuracy"
        else (min(heights) - margin, max(heights) + margin)
    )
    if names:
        _name_ends(axes, ends, names)
    values = sorted(points[x].unique())
    doublings = [
        value for value in values if float(np.log2(value / base)).is_integer()
    ] or values
    # few enough ticks that their labels do not collide
    step = -(-len(doublings) // MOST_TICKS)
    ticks = doublings[doublings.index(base) % step if base in doublings else 0 :: step]
    axes.set_xscale("log", base=2)
    axes.set_xticks(
        ticks,
        [
            f"{n // 1024}k" if n % 1024 == 0 and n >= 8192 else f"{n:.6g}{unit}"
            for n in ticks
        ],
    )
    axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(x=0.02)
    if x == "length":
        axes.axvline(base, color=DARK, ls=":", lw=1)


def _name_ends(
    axes: Axes, ends: list[tuple[float, float, str, str, str]], capacity: int
) -> None:
    """Write names right of the panel at the ends of their curves, pushed apart so that
    `capacity` of them would fit.
    """
    ends, (low, high) = sorted(ends), axes.get_ylim()
    heights, gap = np.clip([end[0] for end in ends], low, high), (high - low) / capacity
    for _ in range(300):
        close = np.maximum(0, gap - np.diff(heights)) / 2
        heights[:-1] -= close
        heights[1:] += close
    heights += max(0.0, low - heights.min(initial=low))  # names stay above the ticks
    for (y, x, name, colour, group), height in zip(ends, heights, strict=True):
        line = {
            "arrowstyle": "-",
            "color": colour,
            "lw": 0.5,
            "relpos": (0, 0.5),
            "shrinkA": 1,
            "shrinkB": 1,
        }
        axes.annotate(
            name,
            (x, min(y, high)),
            xytext=(1.04, height),
            textcoords=axes.get_yaxis_transform(),
            va="center",
            color=colour,
            annotation_clip=False,
            fontsize=8,
            gid=group,
            arrowprops=line,
        )


def _differences(axes: Axes, rows: pd.DataFrame, colours: Mapping[str, str]) -> None:
    """Draw each difference of the loss at the training length from the reference, with
    its adjusted interval.
    """
    for place, row in enumerate(rows.iloc[::-1].to_dict("records")):
        ends = [row[f"nll_difference_adjusted_{end}"] for end in ("low", "high")]
        colour, group = colours[row["label"]], f"curve-{row['label']}"
        axes.plot(ends, [place, place], color=colour, lw=2, gid=group)
        axes.plot(row["nll_difference"], place, "o", color=colour, ms=4.5, gid=group)
    axes.axvline(0, color=DARK, lw=0.8)
    axes.set_yticks(
        range(len(rows)),
        [cut(label, LONGEST_NAME) for label in rows["label"].iloc[::-1]],
    )
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.grid(axis="y", visible=False)
    axes.locator_params(axis="x", nbins=5)
    axes.set(
        title=f"Loss above {cut(rows.attrs['reference'], LONGEST_NAME)}",
        xlabel="nats per token, adjusted 95 %",
    )
