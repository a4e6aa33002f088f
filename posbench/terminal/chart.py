"""Curves in characters, as wide as the console; in ASCII if the console needs it."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from rich.text import Text

LABEL = 10  # characters of a number on the left plus the axis
NARROWEST = 12  # characters between the first and the last value of x


@dataclasses.dataclass(frozen=True)
class Series:
    name: str
    points: dict[int, float]  # x -> y
    mark: str
    style: str


@dataclasses.dataclass(frozen=True)
class _Scale:
    """The place of values: columns from the left, lines from the bottom."""

    columns: dict[int, int]  # of each x, evenly spaced
    height: int
    low: float
    span: float
    digits: int  # decimals of its numbers

    def line(self, y: float) -> int:
        return round((y - self.low) / self.span * (self.height - 1))

    def value(self, line: int) -> float:
        return self.low + self.span * line / (self.height - 1)


def draw(series: Sequence[Series], units: tuple[str, str], width: int, least: float, plain: bool) -> Text:
    """Curves over the same axes, the first on top of the others.

    Args:
        units: names of x and y.
        width: of the console and the chart.
        least: the smallest span of y, so that noise looks flat.
        plain: whether to draw in ASCII.
    """
    scale = _scale(series, width, least)
    text = Text(f"{units[1]}\n")
    cells = _cells(series, scale, "." if plain else "·")
    for line in reversed(range(scale.height)):
        label = f"{scale.value(line):7.{scale.digits}f}" if line % 3 == 0 else ""
        text.append(f"{label:7} {'|' if plain else '│'} ")
        for column in range(max(scale.columns.values()) + 1):
            text.append(*cells.get((column, line), (" ", "")))
        text.append("\n")
    text.append(_labels(scale))
    entries = [(f"{units[0]} ", ""), *((f"{one.mark} {one.name}", one.style) for one in series)]
    return text.append(_legend(entries, width))


def _scale(series: Sequence[Series], width: int, least: float) -> _Scale:
    """The scale; height follows the width, and every third line has a number."""
    known = sorted({x for one in series for x in one.points})
    room = max(NARROWEST, width - LABEL - len(str(known[-1])))
    values = [y for one in series for y in one.points.values()]
    middle, half = (max(values) + min(values)) / 2, max(max(values) - min(values), least) / 2
    numbers = min(6, max(2, room // 16))
    low, step, digits = _round(middle - half, middle + half, numbers)
    return _Scale(
        columns={x: round(place * room / max(1, len(known) - 1)) for place, x in enumerate(known)},
        height=1 + 3 * numbers,
        low=low,
        span=step * numbers,
        digits=digits,
    )


def _round(low: float, high: float, steps: int) -> tuple[float, float, int]:
    """The start of an axis with this many steps, the least round step that covers the range, and its decimals."""
    exponent = math.floor(math.log10((high - low) / steps))
    for factor, tens in ((1, 0), (2, 0), (2.5, 0), (5, 0), (1, 1), (2, 1), (2.5, 1), (5, 1)):
        step = factor * 10.0 ** (exponent + tens)
        start = math.floor(low / step + 1e-9) * step
        if start + step * (steps + 1e-9) >= high:
            return start, step, max(0, -exponent - tens + (factor == 2.5))
    raise AssertionError("a step of ten times the range over the steps covers it")


def _cells(series: Sequence[Series], scale: _Scale, dot: str) -> dict[tuple[int, int], tuple[str, str]]:
    """The sign at a column and a line, and its style."""
    cells: dict[tuple[int, int], tuple[str, str]] = {}
    for one in reversed(series):
        places = [(scale.columns[x], scale.line(y)) for x, y in sorted(one.points.items())]
        for (x0, y0), (x1, y1) in itertools.pairwise(places):
            for x in range(x0 + 1, x1):
                cells[x, round(y0 + (y1 - y0) * (x - x0) / (x1 - x0))] = (dot, one.style)
        cells |= {place: (one.mark, one.style) for place in places}
    return cells


def _labels(scale: _Scale) -> str:
    """The values of x below their marks, as far as there is room."""
    line = " " * LABEL
    for x, column in scale.columns.items():
        at = LABEL + column
        if at > len(line.rstrip()) or not column:
            line = f"{line.ljust(at)}{x}"
    return line + "\n"


def _legend(entries: Sequence[tuple[str, str]], width: int) -> Text:
    """The legend, on as many lines as it needs."""
    text, left = Text(), 0
    for number, (words, style) in enumerate(entries):
        if number and left < len(words) + 3:
            text.append("\n")
            left = 0
        if not left:
            indent = LABEL if width >= 60 else 1
            text.append(" " * indent)
            left = width - indent
        text.append(words, style)
        text.append("   ")
        left -= len(words) + 3
    text.rstrip()
    return text
