"""The figure of a report, for runs given in Python."""

import io

from matplotlib.figure import Figure

from posbench.errors import UserError
from posbench.report import figures, task_figure
from posbench.report.comparison import load
from posbench.report.comparison.load import Group, RunData
from posbench.report.comparison.standing import standings
from posbench.report.comparison.summary import summarise


class Shown(Figure):
    """A figure that a notebook shows as a cell's value, with or without pyplot."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


def figure(runs: list[RunData], reference: str | None = None) -> Shown:
    """The curves of runs: nll by context, or of a task accuracy by problem length.

    Args:
        reference: as of `load.groups`.

    Raises:
        UserError: they may not be compared, none of them has ended, or none is of the reference.
    """
    found = load.groups(runs, reference)
    if len(found) > 1:
        raise UserError(f"these runs may not be compared, they differ in {_differences(found)}: plot those of one kind")
    (group,) = found
    if group.task is not None:
        made, needed = task_figure.of_group(group, standings(group), Shown), "tested on its problems"
    else:
        made, needed = figures.of_group(group, summarise(group), Shown), "evaluated with fixed_target"
    if made is None:
        raise UserError(f"nothing to plot: expected a run that has ended and was {needed}")
    assert isinstance(made, Shown)
    return made


def _differences(found: list[Group]) -> str:
    """`task: copy or passkey`; of one task, or of text, their settings."""
    tasks = sorted({group.task or "none, text" for group in found})
    values = (
        {"task": tasks} if len(tasks) > 1 else {k: sorted({g.settings[k] for g in found}) for k in found[0].settings}
    )
    return "; ".join(f"{key}: {' or '.join(either)}" for key, either in values.items())
