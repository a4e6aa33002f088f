"""Names beside the ends of lines, pushed apart where they would overlap.

This needs all places on the page, so it has two steps: `name` reserves room, and `place` sets heights once the layout
is final.
"""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from posbench.report.lines import Line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Text

NAME_WIDTH, NAME_LINES = 18, 4  # characters, lines
GAP = 6.0  # points between a panel and its names
FONT = 10.0  # points


def wrapped(text: str) -> str:
    """A name in a few short lines; a very long one keeps its beginning and its end."""
    room = NAME_WIDTH * NAME_LINES
    lines = textwrap.wrap(text, NAME_WIDTH)
    if len(lines) > NAME_LINES:
        text = f"{text[: room // 2 - 3]}… {text[3 - room // 2 :]}"
        lines = textwrap.wrap(text, NAME_WIDTH)
    return "\n".join(lines)


def said(line: Line) -> str:
    """The name of a line, plus facts that its picture does not show."""
    words = [wrapped(line.label)]
    if line.seeds:
        words.append("every seed")
    if line.undefined_at:
        words.append(f"undefined from {line.undefined_at:g}x")
    return "\n".join(words)


def name(axis: "Axes", line: Line) -> "Text":
    """The line's name on the right of its panel; `place` sets its height."""
    from matplotlib.transforms import ScaledTranslation

    beside = axis.transAxes + ScaledTranslation(GAP / 72, 0, axis.figure.dpi_scale_trans)
    return axis.text(
        1, 0.5, said(line), transform=beside, color=line.style.colour, fontsize=FONT, va="center", linespacing=1.05
    )


def place(axis: "Axes", lines: Sequence[Line], names: Sequence["Text"]) -> None:
    """Place names beside line ends; the layout must be final."""
    box = axis.get_window_extent()
    ends = [float(np.clip(axis.transData.transform(line.points[-1])[1], box.y0, box.y1)) for line in lines]
    sizes = [text.get_window_extent().height + 2 for text in names]
    for text, height in zip(names, apart(ends, sizes, box.y0, box.y1), strict=True):
        text.set_y((height - box.y0) / box.height)


def apart(wanted: Sequence[float], sizes: Sequence[float], low: float, high: float) -> list[float]:
    """Centres for things of these sizes, in the wanted order, without overlap, from `low` to `high` if there is room.

    Each is pushed up by those below it, then down by the upper end.
    """
    order = np.argsort(wanted, kind="stable")
    found, edge = np.array(wanted, dtype=np.float64), low
    for i in order:
        found[i] = max(found[i], edge + sizes[i] / 2)
        edge = found[i] + sizes[i] / 2
    edge = max(high, low + sum(sizes))
    for i in order[::-1]:
        found[i] = min(found[i], edge - sizes[i] / 2)
        edge = found[i] - sizes[i] / 2
    return [float(centre) for centre in found]
