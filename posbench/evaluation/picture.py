"""The extrapolation curve of one run as a picture."""

from typing import TYPE_CHECKING

from posbench.runs.rows import EvaluationRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLES = {"fixed_target": ("#0072B2", "o"), "windowed": ("#D55E00", "s"), "nonoverlap": ("#8C8C8C", "D")}


def draw(rows: list[EvaluationRow], title: str) -> "Figure":
    """nll against context for the curves of `STYLES`, that of the headline with its interval."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator

    figure = Figure(figsize=(6.4, 4.0), dpi=120, layout="constrained")
    axes = figure.subplots()
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
    axes.set_title(title, parse_math=False)
    axes.set_xlabel("tokens of context")
    axes.set_ylabel("nats per token")
    if lengths:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(lengths))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.legend(frameon=False)
    axes.grid(color="#E4E4E4", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
