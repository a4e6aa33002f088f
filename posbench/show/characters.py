"""Pictures made of characters. Shape alone carries the numbers; colour only helps."""

import dataclasses
import math

import numpy as np
from rich.columns import Columns
from rich.console import Console, Group
from rich.rule import Rule
from rich.text import Text

from posbench.show.panels import Curves, Heatmap, Numbers, Panel, Picture
from posbench.terminal import console

WIDTH, HEIGHT = 28, 10  # of a plot, in characters; two fit side by side into 80 columns
MARGIN = 8  # for the y axis
COLOURS = ("bright_blue", "yellow", "green", "magenta")
MARKS = "123456789abcdefghijklmnopqrstuvwxyz"  # of curves, in order

Cells = dict[tuple[int, int], tuple[str, str]]  # (column, row from the top) -> character, style


class Signs:
    """The characters of a picture; ASCII if the terminal has no others."""

    def __init__(self, out: Console) -> None:
        if console.carries_unicode(out):
            self.encoding, self.times = out.encoding, "·"
            self.shades, self.band = " ░▒▓█", "░"
            self.bar, self.line, self.dot, self.undefined = "│─●·"
        else:
            self.encoding, self.times = "ascii", "."
            self.shades, self.band = " .:-=+*#%@", "."
            self.bar, self.line, self.dot, self.undefined = "|-*/"

    def say(self, text: str) -> str:
        """Text with only characters that the terminal can show."""
        return text.replace("·", self.times).encode(self.encoding, "replace").decode(self.encoding)


def print_pictures(pictures: list[Picture]) -> None:
    """Each encoding's panels in a row, as many as fit."""
    out = console.stdout()
    signs = Signs(out)
    for picture in pictures:
        title = signs.say(_title(picture))
        out.print(title if len(title) > out.width - 4 else Rule(title, characters=signs.line))  # a rule would cut it
        out.print(Columns([_panel(panel, signs) for panel in picture.panels], padding=(1, 3)))
    lengths = dict.fromkeys(f"{picture.train_length} tokens" for picture in pictures)
    out.print(f"{signs.bar} marks the training length, {' or '.join(lengths)}.")


def _title(picture: Picture) -> str:
    return f"{picture.name} ({picture.subtitle})" if picture.subtitle else picture.name


def _panel(panel: Panel, signs: Signs) -> Group:
    return _heatmap(panel, signs) if isinstance(panel, Heatmap) else _curves(panel, signs)


def _heatmap(panel: Heatmap, signs: Signs) -> Group:
    rows, columns = panel.values.shape
    size = float(np.nanmax(np.abs(panel.values)))
    cells: Cells = {}
    for row in range(HEIGHT):
        for column in range(WIDTH):
            value = panel.values[row * rows // HEIGHT, column * columns // WIDTH]
            if np.isnan(value):
                cells[column, row] = (signs.undefined, "bright_black")
                continue
            level = int((value / size + 1) / 2 * (len(signs.shades) - 1) + 0.5)
            cells[column, row] = (signs.shades[level], COLOURS[0] if value >= 0 else COLOURS[1])
    if panel.limit is not None:
        cells |= _bar(round(panel.limit / columns * WIDTH), signs)
    shades = f"'{signs.shades[0]}' {-size:.2g} .. '{signs.shades[-1]}' {size:.2g}"
    legend = f"{panel.y_label}; {shades}"
    return _framed(panel.title, cells, ("0", str(rows - 1)), legend, panel.x_label, signs, str(columns - 1))


def _curves(panel: Curves, signs: Signs) -> Group:
    axes = _axes(panel)
    cells: Cells = {}
    if panel.limit is not None:
        cells |= _training_end(panel.limit, panel.x[-1], axes, signs)
    if panel.limit_y is not None:
        cells |= {(column, axes.row(panel.limit_y)): (signs.line, "") for column in range(WIDTH)}
    if panel.band is not None:
        cells |= _band(panel.x, panel.band, axes, signs)
    for index, values in reversed(list(enumerate(panel.series.values()))):  # the first curve is drawn last, on top
        mark = signs.dot if len(panel.series) == 1 else MARKS[index % len(MARKS)]
        cells |= _points(panel.x, values, axes, (mark, COLOURS[(panel.colour + index) % len(COLOURS)]))
    labels = tuple(f"{10**edge if axes.log_y else edge:.3g}" for edge in (axes.high, axes.low))
    drawn = _framed(panel.title, cells, labels, _legend(panel, signs), panel.x_label, signs, f"{axes.end:g}")
    return Group(drawn, Text(f"{panel.note:^{MARGIN + WIDTH}}", style="bright_black")) if panel.note else drawn


@dataclasses.dataclass(frozen=True)
class _Axes:
    """The axes of a plot: x from 0 to `end`, y (with `log_y` its logarithm) from `low` to `high`."""

    end: float
    low: float
    high: float
    log_y: bool

    def column(self, x: float) -> int:
        return round(x / self.end * (WIDTH - 1))

    def row(self, y: float) -> int:
        scaled = math.log10(y) if self.log_y else y
        return min(HEIGHT - 1, max(0, round((self.high - scaled) / (self.high - self.low) * (HEIGHT - 1))))


def _axes(panel: Curves) -> _Axes:
    y_range = _range(panel, [_scaled(values, panel.log_y) for values in (*panel.series.values(), *(panel.band or ()))])
    return _Axes(float(panel.x[-1]) if panel.end is None else panel.end, *y_range, panel.log_y)


def _range(panel: Curves, drawn: list[Numbers]) -> tuple[float, float]:
    low, high = panel.widened(*(float(f([f(values) for values in drawn])) for f in (np.nanmin, np.nanmax)))
    if panel.even:
        return min(low, -0.6), max(high, 0.6)  # attention: a factor of 4 either way, or noise fills the panel
    return (low, high) if high - low > 1e-9 else (low - 0.5, high + 0.5)


def _scaled(values: Numbers, log: bool) -> Numbers:
    return np.asarray(np.log10(values)) if log else values


def _training_end(limit: float, last: float, axes: _Axes, signs: Signs) -> Cells:
    """A bar where training ended; if the encoding ends there too, also the shading beyond it."""
    bar = axes.column(limit)
    undefined = range(bar + 1, WIDTH) if last < limit else ()
    cells = {(column, row): (signs.undefined, "bright_black") for column in undefined for row in range(HEIGHT)}
    return cells | _bar(bar, signs)


def _bar(column: int, signs: Signs) -> Cells:
    return {(column, row): (signs.bar, "") for row in range(HEIGHT)}


def _band(x: Numbers, band: tuple[Numbers, Numbers], axes: _Axes, signs: Signs) -> Cells:
    columns = np.array([axes.column(place) for place in x])
    cells: Cells = {}
    for column in set(columns.tolist()):
        bottom, top = (float(f(edge[columns == column])) for f, edge in zip((np.min, np.max), band, strict=True))
        cells |= {(column, row): (signs.band, "bright_black") for row in range(axes.row(top), axes.row(bottom) + 1)}
    return cells


def _points(x: Numbers, y: Numbers, axes: _Axes, sign: tuple[str, str]) -> Cells:
    finite = np.isfinite(_scaled(y, axes.log_y))
    return {(axes.column(a), axes.row(b)): sign for a, b in zip(x[finite], y[finite], strict=True)}


def _legend(panel: Curves, signs: Signs) -> str:
    if len(panel.series) == 1:
        names = panel.y_label
    elif all(name.startswith("head ") for name in panel.series):
        names = f"{panel.y_label}, by head"
    else:
        names = ", ".join(f"{mark} {name}" for mark, name in zip(MARKS, panel.series, strict=False))
    return names if panel.limit_y is None else f"{signs.line} trained to {panel.limit_y:g}; {names}"


def _framed(
    title: str,
    cells: Cells,
    y_labels: tuple[str, ...],
    legend: str,
    x_label: str,
    signs: Signs,
    x_end: str,
) -> Group:
    width = MARGIN + WIDTH
    text = Text(title[:width] + "\n", style="bold", no_wrap=True)
    for row in range(HEIGHT):
        label = y_labels[0] if row == 0 else y_labels[-1] if row == HEIGHT - 1 else ""
        text.append(f"{label:>{MARGIN - 1}} ", style="not bold")
        for column in range(WIDTH):
            character, style = cells.get((column, row), (" ", ""))
            text.append(character, style=f"not bold {style}")
        text.append("\n")
    axis = f"{'0':<{WIDTH // 2 - len(x_label) // 2}}{x_label}"
    text.append(f"{' ' * MARGIN}{axis:<{WIDTH - len(x_end)}}{x_end}", style="not bold")
    return Group(text, Text(signs.say(f"{legend:^{width}}")[:width], style="bright_black"))
