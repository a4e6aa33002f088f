"""`posbench show`: pictures of encodings and of trained runs, as a PNG file in the
style of reports.
"""

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from posbench import encodings, files
from posbench.config import compose, shipped
from posbench.errors import UserError
from posbench.reports import charts
from posbench.run.find import of_id, run_folder
from posbench.show import panels
from posbench.show.panels import Build, Panel, Picture

PNG = "show.png"
COLUMNS, WIDTH, HEIGHT = 4, 3.0, 2.2  # panels in a row, and the inches of each
FAINTEST = 1e-5  # the smallest attention weight that is drawn


def main(
    names: list[str],
    png: Path = Path(PNG),
    phrase: str | None = None,
    words: str | None = None,
) -> None:
    """Draw runs, and encodings with the options after each; or how two words' logit
    changes as their phrase moves.
    """
    if (phrase is None) != (words is None):
        raise UserError(
            "--phrase and --words go together: --phrase 'my daughter called her'"
            " --words daughter,called"
        )
    # more threads gain nothing at these sizes, and are twenty times as slow beside a
    # sweep
    torch.set_num_threads(1)
    # each is used before the next is made
    builders = (builder(*scheme) for scheme in split(names))
    pictures = (
        [panels.phrase_picture(builders, phrase, words)] if phrase and words else []
    )
    for name, options in [] if pictures else split(names):
        folder = of_id(Path(name))
        is_named = encodings.PLACE.fullmatch(name) or name in shipped.choices(
            "encoding", (), shipped.EVERY
        )
        is_run = (folder.is_dir() or "/" in name) and not options and not is_named
        pictures.append(
            panels.run_picture(run_folder(folder))
            if is_run
            else panels.picture(*builder(name, options))
        )
    files.write(png, charts.drawn(draw(pictures), "png"))
    print(png)


def split(words: list[str]) -> list[tuple[str, list[str]]]:
    """Split words into names, each with the key=value words after it."""
    schemes: list[tuple[str, list[str]]] = []
    for word in words:
        if "=" not in word:
            schemes.append((word, []))
        elif not schemes:
            raise UserError(
                f"'{word}': expected the name of an encoding, then its options, as in"
                " rope base=100"
            )
        else:
            schemes[-1][1].append(word.removeprefix("encoding."))
    return schemes


def builder(name: str, words: list[str]) -> tuple[str, Build]:
    """Return an encoding's label, as it was typed, and what builds it; options are read
    as in `posbench train`.
    """
    options = {}
    label = " ".join([name, *words])
    if words or name not in encodings.names():
        scheme = compose.single(
            [f"encoding={name}", *(f"encoding.{word}" for word in words)]
        ).encoding
        name, default = scheme.name, encodings.options_of(scheme.name)
        options = {
            key: value
            for key, value in scheme.options.items()
            if value != default[key] or f" {key}=" in label
        }
    return label, functools.partial(panels.build, name, options)


def draw(pictures: Sequence[Picture]) -> charts.Picture:
    """Draw pictures below each other."""
    columns = min(COLUMNS, max(1, *(len(picture.panels) for picture in pictures)))
    heights = [max(1, -(-len(picture.panels) // columns)) for picture in pictures]
    with matplotlib.rc_context(charts.STYLE):
        figure = charts.Picture(
            figsize=(WIDTH * columns, HEIGHT * sum(heights)), layout="constrained"
        )
        parts = figure.subfigures(
            len(pictures), 1, squeeze=False, height_ratios=heights
        )[:, 0]
        for part, picture, height in zip(parts, pictures, heights, strict=True):
            title = f"{picture.title} (dotted: training length, {picture.train_length})"
            part.suptitle(title, fontsize=10, weight="bold", wrap=True)
            lines = [
                line
                for panel in picture.panels
                for line in (*panel.curves.values(), *panel.image)
            ]
            grid = part.subplots(height, columns, squeeze=False).flat
            for axes, panel in zip(grid, picture.panels, strict=False):
                _panel(axes, panel)
                axes.set_xlim(0, max(map(len, lines)) - 1)
                axes.axvline(
                    picture.train_length - 0.5, color=charts.DARK, ls=":", lw=1
                )
            for axes in grid[len(picture.panels) :]:
                axes.set_axis_off()
    return figure


def _panel(axes: Axes, panel: Panel) -> None:
    axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    if panel.image.size:
        limit = np.nanmax(np.abs(panel.image))
        image = axes.imshow(
            panel.image,
            aspect="auto",
            cmap="PuOr",
            vmin=-limit,
            vmax=limit,
            interpolation="nearest",
        )
        axes.grid(visible=False)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.figure.colorbar(image, ax=axes, pad=0.02)
        return
    for (name, values), colour in zip(
        panel.curves.items(), itertools.cycle(charts.COLOURS), strict=False
    ):
        mask = np.isfinite(values) & (values > (FAINTEST if panel.log else -np.inf))
        axes.plot(np.flatnonzero(mask), values[mask], color=colour, lw=1.5, label=name)
    low, high = axes.get_ylim()
    # with a factor of 4 above and below the data, so that noise looks flat
    if panel.log:
        axes.set(yscale="log", ylim=(axes.dataLim.y0 / 4, axes.dataLim.y1 * 4))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
    elif high - low < 1:
        axes.set_ylim((low + high - 1) / 2, (low + high + 1) / 2)
    if len(panel.curves) > 1:
        axes.legend(
            ncols=2, fontsize=6, handlelength=1, columnspacing=0.8, framealpha=0
        )
