"""The report as one HTML file that needs no network. Everything from a run folder is escaped by jinja or the table."""

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path

import jinja2
import pandas as pd
from matplotlib.figure import Figure

import posbench
from posbench.report import charts
from posbench.report.render import Table

_HERE = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Section:
    """The report on one set of runs that may be compared."""

    heading: str
    facts: str  # what was run
    answer: Sequence[str]
    figure: Figure | None
    main: Table | None  # None: nothing was measured
    more: Sequence[Table]  # folded in the page, not in the terminal


def render(title: str, warnings: Sequence[str], sections: Sequence[Section], runs: pd.DataFrame) -> str:
    """Return the page.

    Args:
        runs: a row per run, of the frame.
    """
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string((_HERE / "page.html.jinja").read_text(encoding="utf-8"))
    facts = runs[["run", "run_status", "run_reason", "command"]].astype("object").fillna("")
    words = [shlex.split(command) for command in facts["command"] if command]
    shared = [word for word in words[0] if all(word in each for each in words)] if words else []
    own = [shlex.join(word for word in shlex.split(command) if word not in shared) for command in facts["command"]]
    return template.render(
        title=title,
        warnings=warnings,
        sections=sections,
        inline=charts.inline,
        shared=shlex.join(shared),
        runs=facts.assign(command=own).to_dict("records"),
        version=posbench.__version__,
        style=(_HERE / "page.css").read_text(encoding="utf-8"),
    )
