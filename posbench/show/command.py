"""`posbench show`: pictures of encodings and of trained runs, as a PNG file in the
style of reports.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import SubFigure
from matplotlib.ticker import MaxNLocator

from posbench import encodings, files
from posbench.config import shipped
from posbench.config.overrides import by_key
from posbench.errors import UserError
from posbench.launch import compose
from posbench.options import by_name
from posbench.reports import charts
from posbench.run.find import of_id, run_folder
from posbench.show import flips, panels
from posbench.show.panels import Build, Panel, Picture
from posbench.typed import PLACE, rewritten

COLUMNS, WIDTH, HEIGHT = 4, 3.0, 2.2  # panels in a row, and the inches of each
FAINTEST = 1e-5  # the smallest attention weight that is drawn


def main(
    names: list[str],
    png: Path,
    phrase: str | None = None,
    words: str | None = None,
) -> None:
    """Draw runs, and encodings with the options after each; or how two words' logit
    changes as their phrase moves.
    """
    # more threads gain nothing at these sizes, and are twenty times as slow beside a
    # sweep
    torch.set_num_threads(1)
    schemes = by_name(names)
    if phrase and words:
        for name, options in schemes:
            if _is_run(name, options):
                raise UserError(f"{name}: --phrase draws encodings, and no runs")
        # each is used before the next is made
        builders = (builder(*scheme) for scheme in schemes)
        pictures = [panels.phrase_picture(builders, phrase, words)]
    elif phrase or words:
        raise UserError(
            "--phrase and --words go together: --phrase 'my daughter called her'"
            " --words daughter,called"
        )
    else:
        pictures = []
        for name, options in schemes:
            if _is_run(name, options):
                folder = run_folder(of_id(Path(name)))
                text = by_key(options).get("data.path")
                pictures.append(panels.run_picture(folder, text))
            else:
                pictures.append(panels.picture(*builder(name, options)))
    files.write(png, charts.image_bytes(draw(pictures), "png"))
    print(png)


def builder(name: str, words: list[str]) -> tuple[str, Build]:
    """Return an encoding's label, as it was typed, and what builds it; options are read
    as in `posbench train`.
    """
    label = " ".join([name, *words])
    if not words and name in encodings.names():
        return label, functools.partial(panels.build, name, {})

    typed = [rewritten(name, f"encoding={name}")]
    typed += [rewritten(word, f"encoding.{word}") for word in words]
    scheme = compose.single(typed).encoding
    options = dict(scheme.options)
    if not any(word.startswith("scale=") for word in words):
        options.pop("scale", None)  # codes are drawn at scale 1
    return label, functools.partial(panels.build, scheme.name, options)


def print_flips(names: list[str]) -> None:
    """Print how often distance flips the order of two keys, for each encoding."""
    for scheme in by_name(names):
        if not _is_run(*scheme):
            label, build = builder(*scheme)
            parts = []
            for length, share in zip(flips.LENGTHS, flips.shares(build), strict=True):
                text = "n/a" if math.isnan(share) else f"{share:.2f}"
                parts.append(f"{text} at {length:,} tokens")
            print(
                f"{label}: share of key pairs whose order flips with distance:"
                f" {', '.join(parts)} (limit 0.5)"
            )


def _is_run(name: str, options: list[str]) -> bool:
    choices = shipped.choices("encoding", (), shipped.EVERY)
    is_of_encoding = any(not option.startswith("data.path=") for option in options)
    if is_of_encoding or name in choices or PLACE.fullmatch(name):
        return False
    return of_id(Path(name)).is_dir() or "/" in name


def draw(pictures: Sequence[Picture]) -> charts.Picture:
    """Draw pictures below each other."""
    most_panels = max(len(picture.panels) for picture in pictures)
    columns = min(COLUMNS, most_panels)
    heights = [math.ceil(len(picture.panels) / columns) for picture in pictures]
    size = WIDTH * columns, HEIGHT * sum(heights)
    with matplotlib.rc_context(charts.STYLE):
        figure = charts.Picture(figsize=size, layout="constrained")
        parts = figure.subfigures(len(pictures), squeeze=False, height_ratios=heights)
        for part, picture, height in zip(parts.flat, pictures, heights, strict=True):
            train_length = picture.train_length
            title = f"{picture.title} (dotted: training length, {train_length})"
            part.suptitle(title, fontsize=10, weight="bold", wrap=True)

            longest = 0
            for panel in picture.panels:
                for line in (*panel.curves.values(), *panel.image):
                    longest = max(longest, len(line))

            grid = part.subplots(height, columns, squeeze=False).flat
            for panel, axes in zip(picture.panels, grid, strict=False):
                _draw_panel(part, axes, panel)
                axes.set_xlim(0, longest - 1)
                axes.axvline(train_length - 0.5, color=charts.DARK, ls=":", lw=1)
            for axes in grid:  # no panel is left for these
                axes.set_axis_off()
    return figure


def _draw_panel(part: SubFigure, axes: Axes, panel: Panel) -> None:
    """Draw an image, or curves."""
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
        part.colorbar(image, ax=axes, pad=0.02)
        return

    colours = itertools.cycle(charts.COLOURS)
    for (name, values), colour in zip(panel.curves.items(), colours, strict=False):
        is_drawn = np.isfinite(values)
        if panel.log:
            is_drawn &= values > FAINTEST
        places = np.flatnonzero(is_drawn)
        axes.plot(places, values[places], color=colour, lw=1.5, label=name)

    # with much room above and below the data, so that noise looks flat
    if panel.log:
        data = axes.dataLim
        axes.set(yscale="log", ylim=(data.y0 / 4, data.y1 * 4))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
    else:
        low, high = axes.get_ylim()
        if high - low < 1:
            middle = (low + high) / 2
            axes.set_ylim(middle - 0.5, middle + 0.5)
    if len(panel.curves) > 1:
        axes.legend(
            ncols=2, fontsize=6, handlelength=1, columnspacing=0.8, framealpha=0
        )
