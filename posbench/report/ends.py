"""The ends of lines: names beside the panel, stop signs, arrows where a line leaves it.

Names and signs are pushed apart so that they do not overlap. This needs all places on the page, so it has two steps:
`name` reserves room, and `place` sets names and signs once the layout is final.
"""

import itertools
import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from posbench.report.lines import Line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Text

STOP = "#B00020"
SIGN = 13.0  # points, across a stop sign
NAME_WIDTH, NAME_LINES = 18, 4  # characters, lines
GAP = 24.0  # points between a panel and its names: room for a mark and the line to it
FONT = 10.0  # points


def wrapped(text: str) -> str:
    """A name in a few short lines; a very long one keeps its beginning and its end."""
    room = NAME_WIDTH * NAME_LINES
    lines = textwrap.wrap(text, NAME_WIDTH)
    if len(lines) > NAME_LINES:
        text = f"{text[: room // 2 - 3]}… {text[3 - room // 2 :]}"
        lines = textwrap.wrap(text, NAME_WIDTH)
    return "\n".join(lines)


def lines_of_text(line: Line) -> int:
    """The number of text lines that its name may take."""
    return len(_said(line, -math.inf).splitlines())


def _said(line: Line, highest: float) -> str:
    """The name of a line, plus facts that its picture does not show."""
    words = [wrapped(line.label)]
    if line.seeds:
        words.append("every seed")
    if line.undefined_at:
        words.append(f"undefined from {line.undefined_at:g}x")
    if line.top > highest:
        words.append(f"up to {line.top:.2f}")
    return "\n".join(words)


def name(axis: "Axes", line: Line) -> "Text":
    """The line's name on the right of its panel; `place` sets its height."""
    from matplotlib.transforms import ScaledTranslation

    beside = axis.transAxes + ScaledTranslation(GAP / 72, 0, axis.figure.dpi_scale_trans)
    words = _said(line, axis.get_ylim()[1])
    return axis.text(
        1, 0.5, words, transform=beside, color=line.style.colour, fontsize=FONT, va="center", linespacing=1.05
    )


def place(axis: "Axes", lines: Sequence[Line], names: Sequence["Text"]) -> None:
    """Place names beside line ends, stop signs and arrows; the layout must be final."""
    box = axis.get_window_extent()
    ends = [float(np.clip(_pixels(axis, line.points[-1])[1], box.y0, box.y1)) for line in lines]
    sizes = [text.get_window_extent().height + _pixels_of(axis, 2) for text in names]
    for line, text, end, height in zip(lines, names, ends, apart(ends, sizes, box.y0, box.y1), strict=True):
        text.set_y((height - box.y0) / box.height)
        _lead(axis, line, end, height)
    _signs(axis, [line for line in lines if line.undefined_at])
    for line in lines:
        _arrows(axis, line)


def apart(wanted: Sequence[float], sizes: Sequence[float], low: float, high: float) -> list[float]:
    """Centres for things of these sizes, in the wanted order, without overlap, between low and high.

    They minimise the sum of squared distances from the wanted centres. Subtracting the sizes before each one turns this
    into isotonic regression; results are clipped at the bounds.
    """
    from scipy.optimize import isotonic_regression

    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    ordered = np.array([sizes[i] for i in order])
    middles = np.cumsum(ordered) - ordered / 2
    free = isotonic_regression(np.array([wanted[i] for i in order]) - middles).x if order else np.zeros(0)
    found = np.clip(free, low, max(low, high - ordered.sum())) + middles
    return [float(found[order.index(i)]) for i in range(len(order))]


def _lead(axis: "Axes", line: Line, end: float, height: float) -> None:
    """Draw the line's mark before its name, and a thin line to it if the line ends at the right edge."""
    box = axis.get_window_extent()
    to = 1 + _pixels_of(axis, GAP - 9) / box.width
    at = (height - box.y0) / box.height
    axis.plot(
        to, at, transform=axis.transAxes, clip_on=False, color=line.style.colour, marker=line.style.mark or "None",
        markerfacecolor="white" if line.hollow else line.style.colour, markersize=5,
        markeredgewidth=1.0 if line.hollow else 0,
    )  # fmt: skip
    inside = axis.get_ylim()[0] <= line.points[-1][1] <= axis.get_ylim()[1]
    if line.undefined_at or line.seeds or line.hollow or not inside:
        return
    start = (_pixels(axis, line.points[-1])[0] - box.x0) / box.width
    bend = 1 + _pixels_of(axis, 2) / box.width
    end_at = (end - box.y0) / box.height
    axis.plot(
        [start, bend, to], [end_at, at, at], transform=axis.transAxes, clip_on=False, color=line.style.colour,
        linewidth=0.7, alpha=0.7, zorder=1.5,
    )  # fmt: skip


def _signs(axis: "Axes", lines: Sequence[Line]) -> None:
    """Draw a stop sign between the last defined length of a scheme and its first undefined one."""
    box, size = axis.get_window_extent(), _pixels_of(axis, SIGN + 2)
    wanted = [_pixels(axis, (_between(line), line.points[-1][1])) for line in lines]
    along = np.array([x for x, _ in wanted])
    order = np.argsort(along, kind="stable")
    for near in np.split(order, np.flatnonzero(np.diff(along[order]) >= size) + 1):
        heights = apart([wanted[i][1] for i in near], [size] * len(near), box.y0, box.y1)
        for i, height in zip(near, heights, strict=True):
            at = float(axis.transData.inverted().transform((wanted[i][0], height))[1])
            _sign(axis, lines[i], at)


def _sign(axis: "Axes", line: Line, y: float) -> None:
    x = _between(line)
    (last, value) = line.points[-1]
    axis.plot([last, x], [value, y], color=STOP, linestyle=":", linewidth=1.4)
    axis.plot(x, y, marker="8", markersize=SIGN, color=STOP, markeredgecolor="white", zorder=5)
    axis.plot(x, y, marker="_", markersize=SIGN / 2, color="white", markeredgewidth=2.2, zorder=6)


def _between(line: Line) -> float:
    return math.sqrt(line.points[-1][0] * (line.undefined_at or 1))


def _arrows(axis: "Axes", line: Line) -> None:
    """Draw an arrow at the upper edge where a line leaves the picture."""
    top = axis.get_ylim()[1]
    for points in line.seeds or [line.points]:
        outside = [value > top for _, value in points]
        if outside and outside[0]:
            _arrow(axis, line, points[0][0])
        for (first, left), (second, right) in itertools.pairwise(points):
            if left <= top < right:
                share = (top - left) / (right - left)
                _arrow(axis, line, first ** (1 - share) * second**share)


def _arrow(axis: "Axes", line: Line, x: float) -> None:
    arrow = {"arrowstyle": "-|>", "color": line.style.colour, "linewidth": 1.5, "shrinkA": 0, "shrinkB": 0}
    axis.annotate(
        "", (x, 1), xycoords=("data", "axes fraction"), xytext=(0, -12), textcoords="offset points", arrowprops=arrow
    )


def _pixels(axis: "Axes", point: tuple[float, float]) -> tuple[float, float]:
    x, y = axis.transData.transform(point)
    return float(x), float(y)


def _pixels_of(axis: "Axes", points: float) -> float:
    return points * axis.figure.dpi / 72
