"""The extrapolation curve of one run as a picture."""

from typing import TYPE_CHECKING

from posbench.run_folder.rows import PLAIN, EvaluationRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLES = {"fixed_target": ("#0072B2", "o"), "windowed": ("#D55E00", "s"), "nonoverlap": ("#8C8C8C", "D")}


def draw_answers(rows: list[EvaluationRow], title: str) -> "Figure":
    """The share of right answers against the length of the problems, of the model and the task as they were trained."""
    figure, axes = _figure(title, "length of the problems / longest trained", "share of right answers")
    plain = [row for row in rows if row.kind == PLAIN and not row.offset and ":" not in (row.task or "")]
    points = sorted((row for row in plain if row.measured), key=lambda row: row.length_ratio)
    lengths = [row.length_ratio for row in points]
    right, whole = ([getattr(row, column) for row in points] for column in ("accuracy", "exact_match"))
    axes.plot(lengths, right, color="#0072B2", marker="o", markersize=5, label="tokens right")
    axes.plot(lengths, whole, color="#8C8C8C", marker="D", markersize=5, label="whole answers")
    axes.axvline(1.0, color="#BBBBBB", linewidth=0.8)
    axes.set_ylim(-0.03, 1.03)
    axes.set_xscale("log", base=2)
    axes.legend(frameon=False)
    return figure


def draw(rows: list[EvaluationRow], title: str) -> "Figure":
    """nll against context for the curves of `STYLES`, that of the headline with its interval."""
    from matplotlib.ticker import FixedLocator, NullLocator

    figure, axes = _figure(title, "tokens of context", "nats per token")
    lengths = sorted({row.length for row in rows if row.curve_name in STYLES})
    for name, (colour, mark) in STYLES.items():
        points = {row.length: row for row in rows if row.curve_name == name and row.measured}
        if not points:
            continue
        own = [points[length] for length in sorted(points)]
        x, nll = [row.length for row in own], [row.nll or 0.0 for row in own]
        axes.plot(x, nll, color=colour, marker=mark, markersize=5, label=name)
        if name == "fixed_target":
            low = [row.ci_low or row.nll or 0.0 for row in own]
            high = [row.ci_high or row.nll or 0.0 for row in own]
            axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    if lengths:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(lengths))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.legend(frameon=False)
    return figure


def _figure(title: str, x: str, y: str) -> "tuple[Figure, Axes]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, parse_math=False)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(color="#E4E4E4", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes
