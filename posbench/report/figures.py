"""The curves as a picture: nll against context, its rise, and every seed a point at 4x. PNG, SVG and PDF.

Up to eight schemes stand in one row of panels; more get a row for each family, beside the reference in grey, on axes
that all rows share. Names stand beside the panels, never in them.
"""

import contextlib
import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from posbench import files
from posbench.report import ends, families, lines, styles
from posbench.report.comparison.load import Group
from posbench.report.comparison.summary import ENDPOINT_RATIO, Curve, Summary
from posbench.report.lines import Line
from posbench.report.styles import Style
from posbench.run_folder.rows import WINDOWED, multiple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    Panels = list[tuple[Axes, list[Line], list[Text]]]  # panels with their lines and names, which have no height yet

SETTINGS: dict[Any, Any] = {
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "svg.fonttype": "none",
    "pdf.fonttype": 42,  # TrueType: conferences refuse matplotlib's Type 3
    "svg.hashsalt": "posbench",  # the same runs give the same file
    "font.size": 10.5,
    "axes.titlesize": 11.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.7,
}
DPI = 160
# What would tell two files of the same runs apart, by kind of file.
UNDATED = {"png": ["Software"], "svg": ["Date", "Creator"], "pdf": ["CreationDate", "Creator", "Producer"]}
WIDTHS = (4.8, 4.8, 2.6)  # inches, of the columns: level, rise, every seed
LOW, HIGH = 2.3, 4.4  # inches, of one row among many and of the only one, at least
NAME_LINE = 0.175  # inches
DARK, GREY = "#333333", "#8C8C8C"  # what is drawn for comparison: once, and in every row
HEADINGS = ("Level: does it hold, and from how good a start?", "Rise on the same targets, paired")
UNITS = (("nll, nats per token", "nll, nats"), ("rise against 1x, nats per token", "rise, nats"))  # for low rows, too


@dataclasses.dataclass(frozen=True)
class Row:
    """The schemes that share a row of panels, and what is drawn of them."""

    title: str
    members: list[Summary]
    level: list[Line]
    rise: list[Line]

    @property
    def height(self) -> float:
        """Inches, room for the names below each other included."""
        most = max(sum(len(ends.said(line).splitlines()) for line in shown) for shown in (self.level, self.rise))
        return max(LOW if self.title else HIGH, NAME_LINE * (most + 1))


def save(group: Group, summaries: list[Summary], folder: Path) -> list[Path]:
    """Write `curves.png`, `.svg` and `.pdf` of a group into a folder; of no curve `remove` them."""
    return write(of_group(group, summaries), folder)


def write(figure: "Figure | None", folder: Path, name: str = "curves") -> list[Path]:
    """Write `NAME.png`, `.svg` and `.pdf` of a picture into a folder; of none `remove` those of an earlier report."""
    import matplotlib

    if figure is None:
        remove(folder, name)
        return []
    with matplotlib.rc_context(SETTINGS):
        paths = []
        for kind, undated in UNDATED.items():
            paths.append(folder / f"{name}.{kind}")
            drawn = io.BytesIO()
            figure.savefig(drawn, format=kind, dpi=DPI, metadata=dict.fromkeys(undated))
            files.write(paths[-1], drawn.getvalue())
    return paths


def remove(folder: Path, name: str = "curves") -> None:
    """Remove the picture of an earlier report from a folder."""
    for kind in UNDATED:
        with contextlib.suppress(OSError):
            (folder / f"{name}.{kind}").unlink()


def of_group(group: Group, summaries: list[Summary], kind: "type[Figure] | None" = None) -> "Figure | None":
    """The picture of a group, of a subclass of Figure if `kind` gives one; None if no run has a curve."""
    import matplotlib

    drawn = [one for one in summaries if any(point.nll is not None for point in one.plain.points)]
    with matplotlib.rc_context(SETTINGS):
        return draw(group, drawn, kind) if drawn else None


def draw(group: Group, summaries: list[Summary], kind: "type[Figure] | None" = None) -> "Figure":
    """The picture of schemes that all have a curve, its layout final."""
    looks = styles.assign((scheme.name, scheme.label) for scheme in group.schemes)
    rows = _rows(group, summaries, looks)
    widths = WIDTHS if any(one.n_done > 1 for one in summaries) else WIDTHS[:2]
    figure, axes = sheet(widths, [row.height for row in rows], kind)
    named = []
    for column, shown in enumerate(([row.level for row in rows], [row.rise for row in rows])):
        named += _column(list(axes[column]), group, summaries, shown)
        headings(axes[column], [row.title for row in rows], HEADINGS[column], UNITS[column][len(rows) > 1])
    for axis in axes[1]:
        axis.axhline(0, color="#555555", linewidth=0.9, zorder=1.5)
    if len(widths) > 2:
        _strips(list(axes[2]), rows, looks)
    return finished(figure, named)


def sheet(widths: Sequence[float], heights: Sequence[float], kind: "type[Figure] | None") -> "tuple[Figure, Any]":
    """A figure and its panels by column and row, sizes in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = (kind or Figure)(figsize=(sum(widths), sum(heights) + 0.9), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)  # measures texts
    ratios: dict[str, Any] = {"width_ratios": widths, "height_ratios": heights}
    return figure, figure.subplots(len(heights), len(widths), squeeze=False, **ratios).T


def finished(figure: "Figure", named: "Panels") -> "Figure":
    """The figure with its names, once nothing else changes its layout."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    ConstrainedLayoutEngine().execute(figure)
    figure.set_layout_engine(None)  # what is placed now stays where it is
    for axis, drawn, names in named:
        ends.place(axis, drawn, names)
    return figure


# -- what is drawn -----------------------------------------------------------------------------------------------------


def _is_reference(one: Summary, group: Group) -> bool:
    return group.reference is not None and one.scheme.label == group.reference.label


def _rows(group: Group, summaries: list[Summary], looks: dict[str, Style]) -> list[Row]:
    """The rows with the lines of their schemes, and for comparison the windowed baseline and the reference."""
    rows = families.rows(summaries)
    alone = len(rows) == 1
    windowed = _windowed(group, summaries, DARK if alone else GREY)
    reference = [] if alone else [one for one in summaries if _is_reference(one, group)]
    found = []
    for title, members in rows:
        shown = [(one, looks[one.scheme.label]) for one in members]
        shown += [(one, Style(GREY, "", "")) for one in reference if one not in members]
        curves = [(one, one.plain, look) for one, look in shown] + windowed
        level, rise = ([build(*curve) for curve in curves] for build in (lines.level, lines.rise))
        found.append(Row(title, members, level, [line for line in rise if line.points and not line.ends_at_once]))
    return found


def baseline(group: Group, summaries: list[Summary]) -> Summary | None:
    """Whose windowed curve is drawn for comparison: the reference's, else the best one's at the training length."""
    having = [one for one in summaries if any(curve.kind == WINDOWED for curve in one.curves) and one.nll]
    own = next((one for one in having if _is_reference(one, group)), None)
    return own or min(having, key=lambda one: one.nll.mean if one.nll else 0.0, default=None)


def _windowed(group: Group, summaries: list[Summary], colour: str) -> list[tuple[Summary, Curve, Style]]:
    """The baseline, which starts where its scheme does at the training length; nothing if there is none."""
    one = baseline(group, summaries)
    if one is None:
        return []
    found = next(curve for curve in one.curves if curve.kind == WINDOWED)
    return [(one, Curve(WINDOWED, one.with_start(found)), Style(colour, "", styles.DASHES[1]))]


# -- curves ------------------------------------------------------------------------------------------------------------


def _column(axes: "list[Axes]", group: Group, summaries: list[Summary], rows: list[list[Line]]) -> "Panels":
    """Panels below each other that share an axis."""
    shown = [line for row in rows for line in row]
    limits = lines.limits(shown) if shown else (0.0, 1.0)
    named = []
    for axis, row in zip(axes, rows, strict=True):
        for line in row:
            _draw(axis, line)
        axis.set_ylim(limits)
        _context_axis(axis, group, summaries)
        named.append((axis, row, [ends.name(axis, line) for line in row]))
    before = f"{group.original_length}, then " if group.original_length else ""
    axes[-1].set_xlabel(f"context, tokens (log scale)\ndotted: trained at {before}{group.train_length}")
    return named


def _draw(axis: "Axes", line: Line) -> None:
    """A line with its band; in place of a mean that no seed is near, a thin line per seed."""
    look = line.style
    dash: Any = (0, [float(part) / 1.6 for part in look.dash.split()]) if look.dash else "-"
    shape = {"linewidth": 1.7, "linestyle": dash, "markersize": 5.5, "markeredgecolor": "white"}
    if line.seeds:
        shape = {"linewidth": 0.9, "markersize": 4.0}
    for points in line.seeds or [line.points]:
        axis.plot(
            *zip(*points, strict=True), color=look.colour, marker=look.mark or "None", markeredgewidth=0.5,
            zorder=2 if look.mark else 1.9, **shape,
        )  # fmt: skip
    if line.band:
        low, high = [band.low for _, band in line.band], [band.high for _, band in line.band]
        axis.fill_between([ratio for ratio, _ in line.band], low, high, color=look.colour, alpha=0.15, linewidth=0)


def _context_axis(axis: "Axes", group: Group, summaries: list[Summary]) -> None:
    points = {p.ratio: p.length for one in summaries for p in one.plain.points}
    ratios = sorted(points)
    axis.set_xscale("log", base=2)
    named = {r: multiple(r) if r >= 1 else multiple(r).rstrip("x") for r in ratios if r >= 1 or (1 / r).is_integer()}
    axis.set_xticks(ratios, [f"{points[ratio]}\n{named[ratio]}" if ratio in named else "" for ratio in ratios])
    axis.minorticks_off()
    axis.set_xlim(ratios[0] / 1.2, ratios[-1] * 1.2)
    for length in filter(None, (group.train_length, group.original_length)):
        axis.axvline(length / group.train_length, color=DARK, linewidth=1.1, linestyle=":")


def headings(axes: "Sequence[Axes]", titles: Sequence[str], heading: str, unit: str) -> None:
    """Write what a column shows, and above each row its family if there are several."""
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title, loc="left", fontweight="bold", fontsize=SETTINGS["font.size"])
        axis.set_ylabel(unit)
    axes[0].annotate(
        heading, (0, 1), xycoords="axes fraction", xytext=(0, 24 if len(titles) > 1 else 6), textcoords="offset points",
        fontsize=SETTINGS["axes.titlesize"],
    )  # fmt: skip


# -- every seed --------------------------------------------------------------------------------------------------------


def _strips(axes: "list[Axes]", rows: list[Row], looks: dict[str, Style]) -> None:
    """Every seed a point: a mean hides two groups, and with them its bar is left out."""
    known = {one.scheme.label: _seeds(one) for row in rows for one in row.members if _seeds(one)}
    if not known:  # nothing was measured there
        for axis in axes:
            axis.set_visible(False)
        return
    shown = [0.0, *(value for values in known.values() for value in values)]
    room = 0.06 * max(max(shown) - min(shown), 0.02)
    for axis, row in zip(axes, rows, strict=True):
        axis.set_xlim(min(shown) - room, max(shown) + room)
        _strip(axis, [one for one in row.members if one.scheme.label in known], looks)
    axes[-1].set_xlabel("rise, nats per token")
    headings(axes, [""] * len(rows), f"Every seed at {ENDPOINT_RATIO}x", "")


def _strip(axis: "Axes", members: list[Summary], looks: dict[str, Style]) -> None:
    for row, one in enumerate(reversed(members)):
        look, values = looks[one.scheme.label], _seeds(one)
        offsets = np.linspace(-0.18, 0.18, len(values)) if len(values) > 1 else np.zeros(1)
        axis.scatter(values, row + offsets, color=look.colour, marker=look.mark, s=22, alpha=0.85, linewidth=0)
        if len(values) > 1 and not one.bimodal:
            axis.plot([np.mean(values)] * 2, [row - 0.34, row + 0.34], color=look.colour, linewidth=1.6)
    axis.axvline(0, color=DARK, linewidth=0.9)
    names = [one.scheme.label + (" (two groups)" if one.bimodal else "") for one in reversed(members)]
    axis.set_yticks(range(len(members)), [ends.wrapped(name) for name in names], fontsize=ends.FONT)
    axis.set_ylim(-0.7, max(len(members), 1) - 0.3)
    axis.grid(axis="y", visible=False)


def _seeds(one: Summary) -> list[float]:
    """The rise of each seed at the endpoint's length."""
    point = next((point for point in one.plain.points if point.ratio == ENDPOINT_RATIO), None)
    return list(point.rises.values()) if point else []
