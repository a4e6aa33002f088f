"""Pictures made of characters. They carry the numbers by shape alone; colour, where there is any, only helps."""

import numpy as np
from rich.columns import Columns
from rich.console import Console, Group
from rich.rule import Rule
from rich.text import Text

from posbench.portrait.panels import LENGTH, SHAPE, Curves, Heatmap, Moved, Numbers, Panel, Picture, verdict
from posbench.terminal import console

WIDTH, HEIGHT = 28, 10  # of a plot, in characters; two fit side by side into 80 columns
MARGIN = 8  # for the y axis
COLOURS = ("bright_blue", "yellow", "green", "magenta")

Cells = dict[tuple[int, int], tuple[str, str]]  # (column, row from the top) -> character, style


class Signs:
    """The characters of a picture, as plain as the terminal asks."""

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
        """Text as the terminal can carry it."""
        return text.replace("·", self.times).encode(self.encoding, "replace").decode(self.encoding)


def print_pictures(pictures: list[Picture]) -> None:
    """Each scheme's panels in a row, as many as fit."""
    out = console.stdout()
    signs = Signs(out)
    for picture in pictures:
        out.print(Rule(_title(picture), characters=signs.line))
        out.print(Columns([_panel(panel, signs) for panel in picture.panels], padding=(1, 3)))
    out.print(f"{signs.bar} marks the training length, {SHAPE.train_length} tokens.")


def print_moved(rows: list[Moved], phrase: str, words: tuple[str, str]) -> None:
    """What position adds to a pair's logit, for each scheme, wherever the phrase stands."""
    out = console.stdout()
    signs = Signs(out)
    first, second = words
    out.print(
        signs.say(f"'{phrase}', moved along a sentence: what position adds to the logit of {first} and {second}.")
    )
    drawn = []
    for row in rows:
        half = max(row.change / 2, abs(float(row.contribution.mean())) / 2, 0.5)  # rounding shall not look like change
        middle = float(row.contribution.max() + row.contribution.min()) / 2
        curves = Curves(
            title=row.name,
            x_label="position (tokens)",
            y_label=verdict(row),
            x=row.where,
            series={"": row.contribution},
            limit=SHAPE.train_length,
        )
        drawn.append(_curves(curves, signs, (middle - 1.2 * half, middle + half)))  # the middle is not between two rows
    out.print(Columns(drawn, padding=(1, 3)))
    out.print(f"{signs.bar} marks the training length, {SHAPE.train_length} tokens.")


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
        _mark(cells, round(panel.limit / columns * WIDTH), signs)
    shades = f"'{signs.shades[0]}' {-size:.2g} .. '{signs.shades[-1]}' {size:.2g}"
    return _framed(panel.title, cells, ("0", str(rows - 1)), f"{panel.y_label}; {shades}", panel.x_label, signs)


def _curves(panel: Curves, signs: Signs, y_range: tuple[float, float] | None = None) -> Group:
    series = {name: _scaled(values, panel.log_y) for name, values in panel.series.items()}
    band = tuple(_scaled(edge, panel.log_y) for edge in panel.band) if panel.band is not None else ()
    low, high = _range(panel, [*series.values(), *band]) if y_range is None else y_range
    end = float(panel.x[-1]) if panel.points else LENGTH - 1
    columns = np.round(panel.x / end * (WIDTH - 1)).astype(int)
    cells: Cells = {}
    if panel.limit is not None and panel.x[-1] < panel.limit:
        undefined = range(round(panel.limit / end * (WIDTH - 1)) + 1, WIDTH)
        cells |= {(column, row): (signs.undefined, "bright_black") for column in undefined for row in range(HEIGHT)}
    if panel.limit is not None:
        _mark(cells, round(panel.limit / end * (WIDTH - 1)), signs)
    if panel.limit_y is not None:
        at = _row(float(_scaled(np.array([panel.limit_y]), panel.log_y)[0]), low, high)
        cells |= {(column, at): (signs.line, "") for column in range(WIDTH)}
    for column in set(columns) if band else ():
        chosen = columns == column
        top, bottom = (_row(float(f(b[chosen])), low, high) for f, b in ((np.max, band[1]), (np.min, band[0])))
        cells |= {(int(column), row): (signs.band, "bright_black") for row in range(top, bottom + 1)}
    for index, values in reversed(list(enumerate(series.values()))):
        mark = signs.dot if len(series) == 1 else str(index + 1)
        for column, value in zip(columns.tolist(), values.tolist(), strict=True):
            if np.isfinite(value):
                cells[column, _row(value, low, high)] = (mark, COLOURS[index % len(COLOURS)])
    labels = tuple(f"{10**edge if panel.log_y else edge:.3g}" for edge in (high, low))
    names = panel.y_label
    if len(series) > 1:
        heads = all(name.startswith("head ") for name in series)
        numbered = ", ".join(f"{index + 1} {name}" for index, name in enumerate(series))
        names = f"{names}, by head" if heads else numbered
    if panel.limit_y is not None:
        names = f"{signs.line} trained to {panel.limit_y:g}; {names}"
    x_end = f"{end:g}"
    return _framed(panel.title, cells, labels, names, panel.x_label, signs, x_end)


def _scaled(values: Numbers, log: bool) -> Numbers:
    return np.asarray(np.log10(values)) if log else values


def _range(panel: Curves, drawn: list[Numbers]) -> tuple[float, float]:
    low, high = (float(f([f(values) for values in drawn])) for f in (np.nanmin, np.nanmax))
    if panel.log_y and panel.limit_y is None:
        return min(low, -0.6), max(high, 0.6)  # attention: a factor of 4 either way, or noise fills the panel
    return (low, high) if high - low > 1e-9 else (low - 0.5, high + 0.5)


def _row(value: float, low: float, high: float) -> int:
    return min(HEIGHT - 1, max(0, round((high - value) / (high - low) * (HEIGHT - 1))))


def _mark(cells: Cells, column: int, signs: Signs) -> None:
    cells |= {(column, row): (signs.bar, "") for row in range(HEIGHT)}


def _framed(
    title: str,
    cells: Cells,
    y_labels: tuple[str, ...],
    legend: str,
    x_label: str,
    signs: Signs,
    x_end: str = str(LENGTH - 1),
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
