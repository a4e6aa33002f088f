"""The figures of a report: curves by context, differences from the reference, and for a
task accuracies by length.
"""

import colorsys
import hashlib
import io
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import NullLocator

from posbench.errors import UserError
from posbench.reports.tables import short_label
from posbench.results import compare, tasks
from posbench.results.compare import ENDPOINT_RATIO
from posbench.results.comparison import Comparison, Scheme
from posbench.run.rows import PLAIN, WINDOWED

FigureKind = Literal["panels", "curve"]
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
# The colours of schemes that often stand side by side. All others follow from a digest
# of their name.
WELL_KNOWN = {
    "rope": "#000000",
    "alibi": "#0072B2",
    "fox": "#D55E00",
    "t5": "#56B4E9",
    "none": "#8C6D1F",
    "sinusoidal": "#E69F00",
    "yarn": "#CC79A7",
    "learned": "#009E73",
    "fire": "#882255",
    "kerple_log": "#6A3D9A",
    "cope": "#4D9221",
    "randomized": "#B2182B",
    "dape": "#E7298A",
    "dape_v2": "#17BECF",
    "fox_pro": "#7F0000",
    "path_fox": "#9467BD",
    "projected_bias": "#9A9B00",
    "kerple_power": "#1F3B73",
    "cca": "#FF7F7F",
    "transformer_xl": "#00441B",
    "cable": "#008B8B",
}
# Chosen so that schemes that stand together in docs/rows are far apart.
SALT = "2990"
LIGHTNESS = (0.28, 0.38, 0.48)  # of other schemes, dark enough on white
MOST_NAMED = 12
MOST_TICKS = 7
LONGEST_LINE = 22  # characters of a name
LINES_OF_PANEL = 19  # of names that fit beside a panel
LINES_OF_COLUMN = 11  # the same in a column of a paper
HEIGHT = 3.9  # inches, of panels
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

    def draw(self, renderer: Any) -> None:
        """Draw. To save a figure, matplotlib draws it twice: first for the layout,
        which is all that is done here, then with the layout as it is.
        """
        layout = self.get_layout_engine()
        if isinstance(layout, ConstrainedLayoutEngine) and self.canvas.is_saving():
            layout.execute(self)
        else:
            super().draw(renderer)

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
    """Return a figure as SVG for a page, in the page's font."""
    svg = image_bytes(figure, "svg").decode()
    return re.sub(r"font-family:[^;\"]*;?", "", svg[svg.find("<svg") :])


def runs_figure(frame: pd.DataFrame, reference: str | None = None) -> Picture:
    """Draw runs: the curves of text, or the accuracies of a task; UserError if not
    comparable, or without results.
    """
    if frame["setting"].nunique() > 1:
        raise UserError(
            "these runs may not be compared ('posbench runs' lists what sets them"
            " apart): plot those of one kind"
        )

    figure = None
    if frame["trained_task"].notna().any():
        figure = task_figure(frame)
        requirement = "tested on its problems"
    else:
        losses = compare.Losses.of(frame)
        comparison = compare.compare(frame, reference, losses=losses)
        panels = text_panels(compare.curves(losses), comparison)
        if panels:
            figure = panels_figure(panels)
        requirement = "evaluated with fixed_target"

    if figure is None:
        raise UserError(
            f"nothing to plot: expected a run that has ended and was {requirement}"
        )
    return figure


class Panel(NamedTuple):
    """A part of a figure that can stand alone."""

    width: float  # inches
    draw: Callable[[Axes], None]


def panels_figure(panels: Sequence[Panel], kind: FigureKind = "panels") -> Picture:
    """Draw panels side by side."""
    widths = [panel.width for panel in panels]
    height = HEIGHT if kind == "panels" else 2.7
    with matplotlib.rc_context(STYLE):
        figure = Picture(figsize=(sum(widths), height), layout="constrained")
        grid = figure.subplots(1, len(panels), width_ratios=widths, squeeze=False)
        for axes, panel in zip(grid[0], panels, strict=True):
            panel.draw(axes)
    return figure


def text_panels(
    points: pd.DataFrame, comparison: Comparison, kind: FigureKind = "panels"
) -> list[Panel]:
    """Return the panels on the schemes of one setting: loss by context, what context
    adds, and differences from the reference; none without any loss.

    At most `MOST_NAMED` schemes have a name and a colour, the reference and those with
    the lowest loss; others are grey. `curve` is the first panel alone, as wide as a
    column of a paper. `points`: what `compare.curves` returns.
    """
    if not comparison.measured:
        return []
    base = comparison.reference
    # what has a name and a colour: the reference, and those with the lowest losses
    others = [each.label for each, _ in comparison.measured if each.label != base]
    named = [*others[:MOST_NAMED]]
    if base is not None:
        named = [base, *others[: MOST_NAMED - 1]]

    points = points[points["ratio"] >= 1 / ENDPOINT_RATIO]
    plain = points[points["variant"] == PLAIN]
    narrowed = points[(points["variant"] == WINDOWED) & (points["label"] == base)]
    with_narrowed = pd.concat([plain, narrowed])

    def losses_panel(axes: Axes) -> None:
        _draw_losses(axes, with_narrowed, comparison, named, kind)

    def rises_panel(axes: Axes) -> None:
        _draw_curves(axes, plain, "length", "rise", named)
        shown = _reference_values(plain, comparison, "rise")
        _set_heights(axes, plain["rise"], shown)
        _set_lengths(axes, plain["length"], comparison.train_length)
        axes.set_title("Change from the training length")
        axes.set_xlabel("context in tokens")
        axes.set_ylabel("nats per token")

    def differences_panel(axes: Axes) -> None:
        compared = [
            each for each in comparison.schemes if each.label in set(named) - {base}
        ]
        _draw_differences(axes, compared, str(base))

    if kind != "panels":
        return [Panel(3.5, losses_panel)]
    panels = [Panel(4.4, losses_panel)]
    if points["length"].nunique() > 1:
        panels.append(Panel(3.5, rises_panel))
    if comparison.has_differences:
        panels.append(Panel(3.1, differences_panel))
    return panels


def scheme_colour(label: str) -> str:
    """Return the colour of a scheme, the same in every figure."""
    if label in WELL_KNOWN:
        return WELL_KNOWN[label]
    digest = hashlib.sha256(f"{SALT}{label}".encode()).digest()
    hue = int.from_bytes(digest[:2]) / 2**16
    lightness = LIGHTNESS[digest[2] % len(LIGHTNESS)]
    return to_hex(colorsys.hls_to_rgb(hue, lightness, 0.75))


def _draw_losses(
    axes: Axes,
    points: pd.DataFrame,
    comparison: Comparison,
    named: Sequence[str],
    kind: FigureKind,
) -> None:
    """Draw the loss by context, with those of simple readers as grey levels."""
    span = [points["length"].min(), points["length"].max()]
    levels = {}
    for reader, name in compare.READERS.items():
        levels[name] = pd.Series(comparison.readers.get(reader, math.nan), span)

    ends = _draw_curves(axes, points, "length", "nll", named)
    shown = [end.y for end in ends]
    shown += _reference_values(points, comparison, "nll")
    _set_heights(axes, points["nll"], shown)
    ends += _draw_levels(axes, levels)

    lines = LINES_OF_COLUMN
    if kind == "panels":
        axes.set_title("Loss")
        lines = LINES_OF_PANEL
    _name_ends(axes, ends, lines)
    _set_lengths(axes, points["length"], comparison.train_length)
    axes.set_xlabel("context in tokens (dotted: training length)")
    axes.set_ylabel("loss, nats per token")


def _reference_values(
    points: pd.DataFrame, comparison: Comparison, name: str
) -> list[float]:
    """Return the curve of the reference, which a range holds."""
    of_reference = points[points["label"] == comparison.reference]
    return [*of_reference[name].astype("float64")]


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

    # Those have names that are the most accurate beyond the trained lengths.
    longer = points[points["length_ratio"] > 1].groupby("label")["accuracy"].mean()
    best_first = longer.sort_values(ascending=False).index
    labels = dict.fromkeys([*best_first, *points["label"]])
    named = [*labels][:MOST_NAMED]
    trivial = points.groupby("length_ratio")["trivial"].median()

    with matplotlib.rc_context(STYLE):
        figure = Picture(figsize=(6.4, 3.9), layout="constrained")
        axes = figure.subplots()
        ends = _draw_curves(axes, points, "length_ratio", "accuracy", named)
        axes.set_ylim(-0.03, 1.03)
        ends += _draw_levels(axes, {"trivial reader": trivial})
        _name_ends(axes, ends, LINES_OF_PANEL)
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
    axes: Axes, points: pd.DataFrame, x: str, y: str, named: Sequence[str]
) -> list[End]:
    """Draw a curve for each scheme and variant, with its band if it has a name; return
    the ends of those with a name.
    """
    ends = []
    for (label, variant), curve in points.sort_values(x).groupby(["label", "variant"]):
        is_named = label in named
        colour = scheme_colour(label) if is_named else LIGHT
        name = label
        line: Any = "-"
        if variant != PLAIN:
            name += f", {variant}"
            line = (0, (4, 2))
        width = 1.7 if is_named else 0.8
        has_dots = len(curve) == 1 or x != "length"
        marker = "o" if has_dots else ""

        group = f"curve-{label}"
        axes.plot(
            curve[x],
            curve[y],
            color=colour,
            lw=width,
            ls=line,
            gid=group,
            zorder=2 + is_named,
            marker=marker,
            ms=3,
        )
        if is_named:
            end = curve.iloc[-1]
            ends.append(End(end[y], end[x], _wrapped_name(name), colour, group))
        if is_named and variant == PLAIN:
            low = curve[f"{y}_low"]
            high = curve[f"{y}_high"]
            axes.fill_between(
                curve[x], low, high, color=colour, alpha=0.13, lw=0, gid=group
            )
    return ends


def _wrapped_name(label: str) -> str:
    """Return a label on one or two lines, without its middle if it is longer."""
    if len(label) <= LONGEST_LINE:
        return label
    short = short_label(label, 2 * LONGEST_LINE - 4)
    lines = textwrap.wrap(short, LONGEST_LINE, break_on_hyphens=False)
    if len(lines) > 2:  # a word is longer than a line
        return f"{short[:LONGEST_LINE]}\n{short[LONGEST_LINE:]}"
    return "\n".join(lines)


def _draw_levels(axes: Axes, levels: Mapping[str, pd.Series]) -> list[End]:
    """Draw what simple readers reach as grey lines, in the range that the curves set;
    return their ends.

    A level outside the range stands at its edge in words.
    """
    ends = []
    low, high = axes.get_ylim()
    for name, level in levels.items():
        known = level.dropna()
        if known.empty:
            continue
        last = known.iloc[-1]
        if last < low:
            name = f"{name} {last:.3g}, below"
        elif last > high:
            name = f"{name} {last:.3g}, above"
        else:
            axes.plot(known.index, known, color=GREY, lw=1, zorder=1)
        height = min(max(last, low), high)
        ends.append(End(height, known.index[-1], _wrapped_name(name), GREY, ""))
    axes.set_ylim(low, high)
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

    names = []
    for tick in ticks:
        if tick >= 8192 and tick % 1024 == 0:
            names.append(f"{tick // 1024}k")
        else:
            names.append(f"{tick:.6g}{unit}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, names)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(x=0.02)


def _name_ends(axes: Axes, ends: Sequence[End], n_lines: int) -> None:
    """Write names right of the panel at the ends of their curves, pushed apart so that
    so many lines would fit.
    """
    ends = sorted(ends)
    low, high = axes.get_ylim()
    heights = np.clip([end.y for end in ends], low, high)
    sizes = np.array([1 + end.name.count("\n") for end in ends])
    gaps = (sizes[:-1] + sizes[1:]) / 2 * (high - low) / n_lines
    for _ in range(300):
        close = np.maximum(0, gaps - np.diff(heights)) / 2
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
            linespacing=0.95,
            annotation_clip=False,
            fontsize=8,
            gid=end.group,
            arrowprops=line,
        )


def _draw_differences(axes: Axes, schemes: Sequence[Scheme], reference: str) -> None:
    """Draw each difference of the loss at the training length from the reference, with
    its adjusted interval.
    """
    from_below = schemes[::-1]
    for place, scheme in enumerate(from_below):
        difference = scheme.nll_difference
        if difference is None or difference.interval is None:
            continue
        ends = [difference.adjusted_low, difference.adjusted_high]
        colour = scheme_colour(scheme.label)
        group = f"curve-{scheme.label}"
        axes.plot(ends, [place, place], color=colour, lw=2, gid=group)
        mean = difference.interval.mean
        axes.plot(mean, place, "o", color=colour, ms=4.5, gid=group)

    names = [_wrapped_name(scheme.label) for scheme in from_below]
    axes.axvline(0, color=DARK, lw=0.8)
    axes.set_yticks(range(len(schemes)), names)
    axes.set_ylim(-0.6, len(schemes) - 0.4)
    axes.grid(axis="y", visible=False)
    axes.locator_params(axis="x", nbins=5)
    axes.set_title(f"Loss above {short_label(reference, LONGEST_LINE)}")
    axes.set_xlabel("nats per token,\nadjusted 95 %")
