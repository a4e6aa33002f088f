"""Runs as the figure that a report has."""

import io

from matplotlib.figure import Figure

from posbench.comparison import load
from posbench.comparison.load import RunData
from posbench.comparison.summary import summarise
from posbench.errors import UserError
from posbench.report import figures


class Shown(Figure):
    """A figure that a notebook draws where it is a cell's value, whether or not pyplot has been imported."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


def figure(runs: list[RunData]) -> Shown:
    """The curves of runs.

    Raises:
        UserError: they may not be compared, or none of them has ended.
    """
    found = load.groups(runs)
    if len(found) > 1:
        values = {key: sorted({group.settings[key] for group in found}) for key in found[0].settings}
        differ = "; ".join(f"{key}: {' or '.join(either)}" for key, either in values.items())
        raise UserError(f"these runs may not be compared, they differ in {differ}: plot those of one kind")
    made = figures.of_group(found[0], summarise(found[0]), Shown)
    if made is None:
        raise UserError("nothing to plot: expected a run that has ended and was evaluated with fixed_target")
    assert isinstance(made, Shown)
    return made
