"""The curves as a picture: nll against context, its rise, and every seed a point at 4x. PNG and SVG."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from posbench.comparison.load import Group
from posbench.comparison.summary import ENDPOINT_RATIO, Curve, Summary
from posbench.evaluation.intervals import Interval
from posbench.report.styles import Style, style
from posbench.runs.rows import WINDOWED
from posbench.terminal.exits import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STOP = "#B00020"
SETTINGS: dict[Any, Any] = {
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "svg.fonttype": "none",
    "svg.hashsalt": "posbench",  # the same runs give the same file
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.7,
}
DPI = 160


def save(group: Group, summaries: list[Summary], folder: Path) -> list[Path]:
    """Write `curves.png` and `curves.svg` of a group into a folder; nothing if no run has a curve."""
    import matplotlib
    from matplotlib.figure import Figure

    drawn = [one for one in summaries if any(point.nll is not None for point in one.plain.points)]
    if not drawn:
        return []
    with matplotlib.rc_context(SETTINGS):
        strip = any(one.n_done > 1 for one in drawn)
        figure = Figure(figsize=(14.5 if strip else 11.5, 5.4), layout="constrained")
        left, middle, *right = figure.subplots(1, 2 + strip, width_ratios=[4, 4, 2.6][: 2 + strip])
        _levels(left, group, drawn)
        _rises(middle, group, drawn)
        if strip:
            _strip(right[0], drawn)
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(7, len(labels)), frameon=False)
        paths = [folder / "curves.png", folder / "curves.svg"]
        figure.savefig(paths[0], dpi=DPI, metadata={"Software": None})
        figure.savefig(paths[1], metadata={"Date": None, "Creator": None})
    return paths


def _levels(axis: "Axes", group: Group, summaries: list[Summary]) -> None:
    for one in summaries:
        chosen = style(one.scheme.name, one.scheme.label)
        label = one_line(one.scheme.label)
        points = [(p.ratio, p.nll) for p in one.plain.points if p.nll is not None]
        if one.bimodal:
            _seeds(axis, [(p.ratio, p.levels) for p in one.plain.points], chosen, f"{label} (every seed)")
        else:
            _line(axis, points, chosen, label)
            _band(axis, [(p.ratio, p.band) for p in one.plain.points if p.band], chosen)
        _stop(axis, one.plain, points[-1])
    _windowed(axis, group, summaries)
    axis.set_ylabel("nll, nats per token")
    axis.set_title("Level: does it hold, and from how good a start?")
    _context_axis(axis, group, summaries)


def _rises(axis: "Axes", group: Group, summaries: list[Summary]) -> None:
    axis.axhline(0, color="#555555", linewidth=0.9)
    for one in summaries:
        chosen = style(one.scheme.name, one.scheme.label)
        if one.bimodal:
            _seeds(axis, [(p.ratio, p.rises) for p in one.plain.points], chosen, None)
            continue
        _line(axis, [(p.ratio, p.rise.mean) for p in one.plain.points if p.rise], chosen, None)
        _band(axis, [(p.ratio, p.rise) for p in one.plain.points if p.rise], chosen)
    axis.set_ylabel("rise against 1x, nats per token")
    axis.set_title("Rise on the same targets, paired")
    _context_axis(axis, group, summaries)


def _strip(axis: "Axes", summaries: list[Summary]) -> None:
    """Every seed a point: a mean hides two groups, and with them its bar is left out."""
    shown = []
    for one in summaries:
        point = next((p for p in one.plain.points if p.ratio == ENDPOINT_RATIO), None)
        if point is not None and point.rises:
            shown.append((one, list(point.rises.values())))
    for row, (one, values) in enumerate(reversed(shown)):
        chosen = style(one.scheme.name, one.scheme.label)
        offsets = np.linspace(-0.18, 0.18, len(values)) if len(values) > 1 else [0.0]
        axis.scatter(values, row + np.asarray(offsets), color=chosen.colour, marker=chosen.mark, s=26, alpha=0.85)
        if len(values) > 1 and not one.bimodal:
            axis.plot([np.mean(values)] * 2, [row - 0.34, row + 0.34], color=chosen.colour, linewidth=1.6)
    axis.axvline(0, color="#555555", linewidth=0.9)
    names = [one_line(one.scheme.label) + (" (two groups)" if one.bimodal else "") for one, _ in reversed(shown)]
    axis.set_yticks(range(len(shown)), names)
    axis.set_ylim(-0.7, max(len(shown), 1) - 0.3)
    axis.grid(axis="y", visible=False)
    axis.set_xlabel("rise, nats per token")
    axis.set_title(f"Every seed at {ENDPOINT_RATIO}x")


def _line(axis: "Axes", points: list[tuple[float, float]], chosen: Style, label: str | None) -> None:
    if not points:
        return
    dash: Any = (0, [float(part) / 1.6 for part in chosen.dash.split()]) if chosen.dash else "-"
    axis.plot(
        *zip(*points, strict=True), color=chosen.colour, marker=chosen.mark, markersize=5.5, linewidth=1.7,
        linestyle=dash, markeredgecolor="white", markeredgewidth=0.6, label=label,
    )  # fmt: skip


def _seeds(axis: "Axes", points: list[tuple[float, dict[int, float]]], chosen: Style, label: str | None) -> None:
    """A thin line per seed in place of a mean that no seed is near."""
    for number, seed in enumerate(sorted(points[0][1])):
        known = [(ratio, values[seed]) for ratio, values in points if seed in values]
        axis.plot(
            *zip(*known, strict=True), color=chosen.colour, marker=chosen.mark, markersize=4, linewidth=0.9,
            markeredgecolor="white", markeredgewidth=0.4, label=None if number else label,
        )  # fmt: skip


def _band(axis: "Axes", points: list[tuple[float, Interval]], chosen: Style) -> None:
    low, high = [band.low for _, band in points], [band.high for _, band in points]
    axis.fill_between([ratio for ratio, _ in points], low, high, color=chosen.colour, alpha=0.15, linewidth=0)


def _stop(axis: "Axes", curve: Curve, last: tuple[float, float]) -> None:
    """A stop sign where a scheme ends: beyond it, it is undefined."""
    end = next((point for point in curve.points if point.status == "undefined"), None)
    if end is None:
        return
    at, y = (last[0] * end.ratio) ** 0.5, last[1]
    axis.plot([last[0], at], [y, y], color=STOP, linestyle=":", linewidth=1.4)
    axis.plot(at, y, marker="8", markersize=13, color=STOP, markeredgecolor="white", zorder=5)
    axis.plot(at, y, marker="_", markersize=7, color="white", markeredgewidth=2.2, zorder=6)


def baseline(group: Group, summaries: list[Summary]) -> Summary | None:
    """Whose windowed curve is drawn for comparison: the reference's, else the best one's at the training length."""
    having = [one for one in summaries if any(curve.kind == WINDOWED for curve in one.curves) and one.nll]
    own = next((one for one in having if one.scheme is group.reference), None)
    return own or min(having, key=lambda one: one.nll.mean if one.nll else 0.0, default=None)


def _windowed(axis: "Axes", group: Group, summaries: list[Summary]) -> None:
    one = baseline(group, summaries)
    if one is None:
        return
    start = [p for p in one.plain.points if p.ratio == 1]
    curve = next(curve for curve in one.curves if curve.kind == WINDOWED)
    points = [(p.ratio, p.nll) for p in [*start, *curve.points] if p.nll is not None]
    x, y = zip(*points, strict=True)
    label = f"{one_line(one.scheme.label)}, attention narrowed to {group.train_length}"
    axis.plot(x, y, color="#333333", linestyle=(0, (5, 3)), linewidth=1.5, label=label, zorder=4)


def _context_axis(axis: "Axes", group: Group, summaries: list[Summary]) -> None:
    points = {p.ratio: p.length for one in summaries for p in one.plain.points}
    ratios = sorted(points)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ratios, [f"{points[ratio]}\n{ratio:g}x" for ratio in ratios])
    axis.minorticks_off()
    axis.set_xlim(ratios[0] / 1.2, ratios[-1] * 1.2)
    axis.axvline(1, color="#333333", linewidth=1.1, linestyle=":")
    axis.annotate(
        f"trained at {group.train_length}", (1, 1), xycoords=("data", "axes fraction"), xytext=(4, -3),
        textcoords="offset points", va="top", fontsize=9, color="#333333",
    )  # fmt: skip
    axis.set_xlabel("context, tokens (log scale)")
