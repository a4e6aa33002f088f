"""The figures of a report: curves by context, differences from the reference, and for a
task accuracies by length.
"""

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from posbench.errors import UserError
from posbench.reports.tables import short_label
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
        return image_bytes(self, "png")


def image_bytes(figure: Figure, kind: str) -> bytes:
    """Return a figure as png, pdf or svg, the same bytes each time."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(
            buffer, format=kind, dpi=160, metadata=dict.fromkeys(_UNDATED[kind])
        )
    return buffer.getvalue()


def inline_svg(figure: Figure) -> str:
    """Return a figure as SVG for a page, in the page's font, with numbers rounded to a
    tenth of a point.
    """
    svg = re.sub(
        r"<metadata>.*?</metadata>|font-family:[^;\"]*;?",
        "",
        image_bytes(figure, "svg").decode(),
        flags=re.DOTALL,
    )
    return re.sub(
        r"\d+\.\d{2,}(?![\d<])",
        lambda number: f"{float(number[0]):.1f}",
        svg[svg.find("<svg") :],
    )


def runs_figure(frame: pd.DataFrame, reference: str | None = None) -> Picture:
    """Draw runs: the curves of text, or the accuracies of a task; UserError if not
    comparable, or without results.
    """
    if frame["setting"].nunique() > 1:
        _refuse_settings(frame)

    if frame["trained_task"].notna().any():
        figure = task_figure(frame)
        requirement = "tested on its problems"
    else:
        figure = text_figure(frame, compare.compare(frame, reference))
        requirement = "evaluated with fixed_target"

    if figure is None:
        raise UserError(
            f"nothing to plot: expected a run that has ended and was {requirement}"
        )
    return figure


def _refuse_settings(frame: pd.DataFrame) -> None:
    settings = pd.DataFrame(differing_settings(frame).values()).fillna("null")
    differences = []
    for key, values in settings.items():
        differences.append(f"{key}: {' or '.join(sorted(values.unique()))}")
    raise UserError(
        f"these runs may not be compared, they differ in {'; '.join(differences)}:"
        " plot those of one kind"
    )


def text_figure(
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
    base = table.attrs["reference"]
    colours = _colours(table)

    points = compare.curves(frame)
    points = points[points["ratio"] >= 1 / ENDPOINT_RATIO]
    if kind == "perplexity":
        losses = ["nll", "nll_low", "nll_high"]
        points[losses] = np.exp(points[losses].astype("float64"))
    plain = points[points["variant"] == PLAIN]
    narrowed = points[(points["variant"] == WINDOWED) & (points["label"] == base)]

    panels = ["loss"]
    widths = [1.25]
    size = (3.5, 2.7)
    if kind == "panels":
        size = (11.0, 3.9)
        if points["length"].nunique() > 1:
            panels.append("rise")
            widths.append(1.0)
        if "nll_difference" in table:
            panels.append("difference")
            widths.append(0.9)

    with matplotlib.rc_context(STYLE):
        figure = Picture(figsize=size, layout="constrained")
        grid = figure.subplots(1, len(panels), width_ratios=widths, squeeze=False)
        by_panel = dict(zip(panels, grid[0], strict=True))
        _draw_losses(
            by_panel["loss"], pd.concat([plain, narrowed]), table, colours, kind
        )
        if "rise" in by_panel:
            _draw_rises(by_panel["rise"], plain, colours, table.attrs["train_length"])
        if "difference" in by_panel:
            compared = table["label"].isin(colours) & (table["label"] != base)
            _draw_differences(by_panel["difference"], table[compared], colours)
    return figure


def _colours(table: pd.DataFrame) -> dict[str, str]:
    """Return the colours of the schemes that are named, by label."""
    base = table.attrs["reference"]
    by_loss = table.loc[table["nll"].notna(), "label"]
    others = by_loss[by_loss != base]

    n_others = MOST_NAMED
    if base is not None:
        n_others -= 1
    named = [*others[:n_others], *by_loss[by_loss == base]]
    return dict(zip(sorted(named), COLOURS, strict=False))


def _draw_losses(
    axes: Axes,
    points: pd.DataFrame,
    table: pd.DataFrame,
    colours: Mapping[str, str],
    kind: FigureKind,
) -> None:
    """Draw the loss by context, with those of simple readers as grey levels."""
    ends = [points["length"].min(), points["length"].max()]
    levels = {}
    for reader, name in compare.READERS.items():
        level = table[reader].median()
        if kind == "perplexity":
            level = np.exp(level)
        levels[name] = pd.Series(level, ends)

    ends = _draw_curves(axes, points, "length", "nll", colours) + _draw_levels(
        axes, levels
    )
    _set_heights(axes, points["nll"], [end.y for end in ends])
    if kind == "panels":
        axes.set_title("Loss")
        _name_ends(axes, ends, 19)
    else:
        _name_ends(axes, ends, 11)
    _set_lengths(axes, points["length"], table.attrs["train_length"])
    axes.set_xlabel("context in tokens (dotted: training length)")
    axes.set_ylabel("perplexity" if kind == "perplexity" else "loss, nats per token")


def _draw_rises(
    axes: Axes, points: pd.DataFrame, colours: Mapping[str, str], train_length: int
) -> None:
    _draw_curves(axes, points, "length", "rise", colours)
    _set_heights(axes, points["rise"], [])
    _set_lengths(axes, points["length"], train_length)
    axes.set_title("Change from the training length")
    axes.set_xlabel("context in tokens")
    axes.set_ylabel("nats per token")


def task_figure(frame: pd.DataFrame) -> Picture | None:
    """Draw the schemes of one setting on a task: accuracy by problem length, as the
    median and range over seeds.
    """
    places = tasks.accuracies(frame)
    if not len(places):
        return None
    points = places[places["as_trained"] & (places["status"] == "ok")]
    points = points.rename(
        columns={"accuracy_min": "accuracy_low", "accuracy_max": "accuracy_high"}
    )

    # Colours go by accuracy beyond the trained lengths, the best first.
    longer = points[points["length_ratio"] > 1].groupby("label")["accuracy"].mean()
    best_first = longer.sort_values(ascending=False).index
    labels = dict.fromkeys([*best_first, *points["label"]])
    colours = dict(zip(labels, COLOURS, strict=False))
    trivial = points.groupby("length_ratio")["trivial"].median()

    with matplotlib.rc_context(STYLE):
        figure = Picture(figsize=(6.4, 3.9), layout="constrained")
        axes = figure.subplots()
        ends = _draw_curves(axes, points, "length_ratio", "accuracy", colours)
        ends += _draw_levels(axes, {"trivial reader": trivial})
        axes.set_ylim(-0.03, 1.03)
        _name_ends(axes, ends, 19)
        _set_doublings(axes, points["length_ratio"], 1, "x")
        axes.set_xlabel("length of the problems / longest trained")
        axes.set_ylabel("share of right tokens (median of seeds)")
    return figure


class End(NamedTuple):
    """The right end of a curve, and the name that stands there."""

    y: float
    x: float
    name: str
    colour: str
    group: str


def _draw_curves(
    axes: Axes, points: pd.DataFrame, x: str, y: str, colours: Mapping[str, str]
) -> list[End]:
    """Draw a curve for each scheme and variant, with its band if it has a name; return
    the ends of those with a name.
    """
    ends = []
    for (label, variant), curve in points.sort_values(x).groupby(["label", "variant"]):
        name = short_label(label, LONGEST_NAME)
        colour = colours.get(label, LIGHT)
        line: Any = "-"
        if variant != PLAIN:
            name += f", {variant}"
            colour = DARK
            line = (0, (4, 2))
        is_named = label in colours
        has_dots = len(curve) == 1 or x != "length"

        group = f"curve-{label}"
        axes.plot(
            curve[x],
            curve[y],
            color=colour,
            lw=1.7 if is_named else 0.8,
            ls=line,
            gid=group,
            zorder=2 + is_named,
            marker="o" if has_dots else "",
            ms=3,
        )
        if is_named:
            ends.append(End(curve[y].iloc[-1], curve[x].iloc[-1], name, colour, group))
        if is_named and variant == PLAIN:
            low = curve[f"{y}_low"]
            high = curve[f"{y}_high"]
            axes.fill_between(
                curve[x], low, high, color=colour, alpha=0.13, lw=0, gid=group
            )
    return ends


def _draw_levels(axes: Axes, levels: Mapping[str, pd.Series]) -> list[End]:
    """Draw what simple readers reach as grey lines; return their ends."""
    ends = []
    for name, level in levels.items():
        known = level.dropna()
        if len(known):
            axes.plot(known.index, known, color=GREY, lw=1, zorder=1)
            ends.append(End(known.iloc[-1], known.index[-1], name, GREY, ""))
    return ends


def _set_heights(axes: Axes, values: pd.Series, shown: Sequence[float]) -> None:
    """Set the range of the y axis: all values but those far above most others, and all
    that must be shown.
    """
    low, usual, high = values.quantile([0, 0.9, 1])
    if usual > low:
        high = min(high, usual + 1.5 * (usual - low))
    lowest = min(low, high, *shown)
    highest = max(low, high, *shown)
    margin = 0.04 * (highest - lowest) or 0.1
    axes.set_ylim(lowest - margin, highest + margin)


def _set_lengths(axes: Axes, lengths: pd.Series, train_length: int) -> None:
    _set_doublings(axes, lengths, train_length)
    axes.axvline(train_length, color=DARK, ls=":", lw=1)


def _set_doublings(axes: Axes, lengths: pd.Series, base: int, unit: str = "") -> None:
    """Set the x axis to doublings, with ticks at lengths that are `base` times a power
    of two.
    """
    values = sorted(lengths.unique())
    doublings = [value for value in values if float(np.log2(value / base)).is_integer()]
    ticks = doublings or values

    # few enough that their labels do not collide, and the base among them
    step = math.ceil(len(ticks) / MOST_TICKS)
    start = 0
    if base in ticks:
        start = ticks.index(base) % step
    ticks = ticks[start::step]

    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [_tick_text(value, unit) for value in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(x=0.02)


def _tick_text(value: float, unit: str) -> str:
    if value >= 8192 and value % 1024 == 0:
        return f"{value // 1024}k"
    return f"{value:.6g}{unit}"


def _name_ends(axes: Axes, ends: Sequence[End], capacity: int) -> None:
    """Write names right of the panel at the ends of their curves, pushed apart so that
    `capacity` of them would fit.
    """
    ends = sorted(ends)
    low, high = axes.get_ylim()
    heights = np.clip([end.y for end in ends], low, high)
    gap = (high - low) / capacity
    for _ in range(300):
        close = np.maximum(0, gap - np.diff(heights)) / 2
        heights[:-1] -= close
        heights[1:] += close
    heights += max(0.0, low - heights.min(initial=low))  # names stay above the ticks

    for end, height in zip(ends, heights, strict=True):
        line = {
            "arrowstyle": "-",
            "color": end.colour,
            "lw": 0.5,
            "relpos": (0, 0.5),
            "shrinkA": 1,
            "shrinkB": 1,
        }
        axes.annotate(
            end.name,
            (end.x, min(end.y, high)),
            xytext=(1.04, height),
            textcoords=axes.get_yaxis_transform(),
            va="center",
            color=end.colour,
            annotation_clip=False,
            fontsize=8,
            gid=end.group,
            arrowprops=line,
        )


def _draw_differences(
    axes: Axes, rows: pd.DataFrame, colours: Mapping[str, str]
) -> None:
    """Draw each difference of the loss at the training length from the reference, with
    its adjusted interval.
    """
    from_below = rows.iloc[::-1]
    for place, row in enumerate(from_below.to_dict("records")):
        low = row["nll_difference_adjusted_low"]
        high = row["nll_difference_adjusted_high"]
        colour = colours[row["label"]]
        group = f"curve-{row['label']}"
        axes.plot([low, high], [place, place], color=colour, lw=2, gid=group)
        axes.plot(row["nll_difference"], place, "o", color=colour, ms=4.5, gid=group)

    names = [short_label(label, LONGEST_NAME) for label in from_below["label"]]
    axes.axvline(0, color=DARK, lw=0.8)
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.grid(axis="y", visible=False)
    axes.locator_params(axis="x", nbins=5)
    axes.set_title(f"Loss above {short_label(rows.attrs['reference'], LONGEST_NAME)}")
    axes.set_xlabel("nats per token, adjusted 95 %")
