"""Pictures as PNG files."""

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from posbench.errors import UserError
from posbench.show.panels import Curves, Heatmap, Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
BEYOND = "#8a8a8a"
STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.labelsize": 11,
    "legend.fontsize": 9,
    "figure.titlesize": 14,
}
DPI = 90
ROW = 3.9  # inches, the height of a panel with its legend
LEGEND = 40  # points between a panel and its legend: room for the x axis' numbers and name
THREE_COLUMNS = 15  # longest names, in characters, for a legend of three columns
COLUMNS = 5
WIDEST = 38  # characters of a name in bold, over one panel


def save_pictures(pictures: list[Picture], path: Path) -> None:
    """A row of panels per encoding, or two rows if it has many; UserError if the file cannot be written."""
    most = max(1, *(len(picture.panels) for picture in pictures))
    columns = -(-most // -(-most // COLUMNS))  # six are two rows of three
    heights = [max(1, -(-len(picture.panels) // columns)) for picture in pictures]
    with _style():
        figure = _figure(width=4.1 * columns, height=ROW * sum(heights))
        rows = figure.subfigures(len(pictures), 1, squeeze=False, height_ratios=heights)[:, 0]
        for row, picture, height in zip(rows, pictures, heights, strict=True):
            apart = "  " if columns > 1 else "\n"  # above a single panel there is only room for the name
            note = f"{apart}({picture.subtitle})" if picture.subtitle else ""
            row.suptitle(textwrap.fill(picture.name, WIDEST * columns) + note, fontsize=13, fontweight="bold")
            axes = row.subplots(height, columns, squeeze=False).flatten()
            for axis, panel in zip(axes, picture.panels, strict=False):
                _heatmap(axis, panel) if isinstance(panel, Heatmap) else _curves(axis, panel)
            for axis in axes[len(picture.panels) :]:
                axis.set_axis_off()
        _save(figure, path)


def _style() -> Any:
    import matplotlib

    return matplotlib.rc_context(STYLE)


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    pads = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08)  # inches: the default pads cut numbers at the edge
    return Figure(figsize=(width, height), layout=pads)


def _save(figure: "Figure", path: Path) -> None:
    try:
        figure.savefig(path, dpi=DPI, format="png", pil_kwargs={"optimize": True})
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def _heatmap(axis: "Axes", panel: Heatmap) -> None:
    size = np.nanmax(np.abs(panel.values))
    image = axis.imshow(
        panel.values, aspect="auto", cmap="PuOr", vmin=-size, vmax=size, interpolation="nearest", origin="upper"
    )
    axis.figure.colorbar(image, ax=axis, pad=0.02)
    if len(panel.values) <= 8:
        axis.set_yticks(range(len(panel.values)))
    if np.isnan(panel.values).any():
        start = int(np.isnan(panel.values[0]).argmax())
        axis.axvspan(start - 0.5, panel.values.shape[1] - 0.5, facecolor="white", hatch="///", edgecolor=BEYOND, lw=0)
        _undefined(axis)
    _label(axis, panel)
    if panel.limit is not None:
        axis.axvline(panel.limit - 0.5, color="black", linestyle="--")
        axis.set_xlabel(f"{panel.x_label}; dashed: trained to {panel.limit:g}")


def _curves(axis: "Axes", panel: Curves) -> None:
    for colour, (name, values) in zip(_colours(panel), panel.series.items(), strict=True):
        style = {"marker": "o", "linestyle": "none"} if panel.points else {"linewidth": 1.8}
        axis.plot(panel.x, values, color=colour, label=name, **style)
    if panel.band is not None and np.ptp(np.subtract(*panel.band)) > 1e-9:
        axis.fill_between(panel.x, *panel.band, color=COLOURS[0], alpha=0.25, lw=0, label="lowest to highest")
    _label(axis, panel)
    if panel.least_span:
        axis.set_ylim(panel.widened(*axis.get_ylim()))
    if panel.log_y:
        axis.set_yscale("log")
    if panel.limit is not None:
        _training_end(axis, panel.limit, panel.x[-1] if panel.end is None else panel.end)
        if panel.x[-1] < panel.limit:
            _undefined(axis)
    if panel.limit_y is not None:
        _never_turns(axis, panel.limit_y)
    if panel.points and len(panel.x) <= 16:
        axis.set_xticks(panel.x)
    if panel.log_y and panel.limit_y is None:
        low, high = axis.get_ylim()
        _plain_ticks(axis, fine=high / low < 100)
    if panel.even:  # attention: at least a factor of 4 either way, or noise fills the panel
        low, high = axis.get_ylim()
        low, high = min(low, 0.25), max(high, 4)
        axis.set_ylim(low, high)
        _plain_ticks(axis, fine=high / low < 100)
        axis.axhline(1, color=BEYOND, linewidth=1, linestyle=":")
    if panel.note:
        axis.plot([], [], " ", label=panel.note)
    _legend(axis)


def _legend(axis: "Axes") -> None:
    """Below the panel, where no curve is."""
    from matplotlib.transforms import ScaledTranslation

    below = axis.transAxes + ScaledTranslation(0, -LEGEND / 72, axis.figure.dpi_scale_trans)
    names = axis.get_legend_handles_labels()[1]
    axis.legend(
        loc="upper center", bbox_to_anchor=(0.5, 0), bbox_transform=below, borderaxespad=0, frameon=False,
        ncols=3 if max(map(len, names)) <= THREE_COLUMNS else 2, handlelength=1.6, columnspacing=1.2, handletextpad=0.5,
    )  # fmt: skip


def _colours(panel: Curves) -> list[Any]:
    """A colour per curve; for many heads, in order along a scale that colour-blind readers can follow."""
    count = len(panel.series)
    if count <= len(COLOURS):
        return list(COLOURS[panel.colour :][:count])
    import matplotlib

    return list(matplotlib.colormaps["viridis"](np.linspace(0, 0.95, count)))


def _plain_ticks(axis: "Axes", fine: bool) -> None:
    """Use ticks such as 0.5, 1, 2 instead of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if fine else (1,)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_locator(NullLocator())


def _training_end(axis: "Axes", limit: float, end: float) -> None:
    """Mark the training length on the x axis, which goes to `end`, and shade the part beyond it."""
    axis.set_xlim(0, end)
    axis.axvspan(limit, end + 1, color=BEYOND, alpha=0.15, lw=0)
    axis.axvline(limit, color="black", linestyle="--", linewidth=1.2, label=f"trained to {limit:g}")


def _never_turns(axis: "Axes", limit: float) -> None:
    """Mark the training length on the y axis and shade the wavelengths beyond it."""
    low, high = axis.get_ylim()
    high = max(high, 2 * limit)
    axis.axhspan(limit, high, color=BEYOND, alpha=0.15, lw=0)
    axis.axhline(limit, color="black", linestyle="--", linewidth=1.2, label=f"trained to {limit:g}")
    axis.set_ylim(low, high)
    axis.annotate("never a full turn in training", (0.04, 0.9), xycoords="axes fraction", fontsize=9)


def _label(axis: "Axes", panel: Heatmap | Curves) -> None:
    axis.set_title(panel.title)
    axis.set_xlabel(panel.x_label)
    axis.set_ylabel(panel.y_label)


def _undefined(axis: "Axes") -> None:
    """Write "undefined" beyond the training length, the right half of the panel."""
    axis.text(0.75, 0.5, "undefined", transform=axis.transAxes, ha="center", va="center", color="#444444",
              bbox={"facecolor": "white", "edgecolor": "none"})  # fmt: skip
