"""The report as one HTML file that needs no network. Everything from a run folder is escaped by jinja or the table."""

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path

import jinja2
import pandas as pd
from markupsafe import Markup
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
    style = Markup((_HERE / "page.css").read_text(encoding="utf-8"))  # noqa: S704 - a file of this package
    facts = runs[["run", "run_status", "run_reason", "command"]].astype("object")
    words = [shlex.split(command) for command in facts["command"].dropna()]
    shared = [word for word in words[0] if all(word in each for each in words)] if words else []
    rest = [shlex.join(word for word in each if word not in shared) for each in words]
    facts.loc[facts["command"].notna(), "command"] = rest
    return template.render(
        title=title,
        warnings=warnings,
        sections=[_shown(section) for section in sections],
        shared=shlex.join(shared),
        runs=facts.where(facts.notna(), None).to_dict("records"),
        version=posbench.__version__,
        style=style,
    )


def _shown(section: Section) -> dict[str, object]:
    """Return what the template shows of a section."""
    return {
        "heading": section.heading,
        "facts": section.facts,
        "answer": section.answer,
        "svg": Markup(charts.inline(section.figure)) if section.figure else "",  # noqa: S704 - matplotlib escapes texts
        "main": Markup(section.main.html()) if section.main else "",  # noqa: S704 - escaped there
        "more": [(table.title, Markup(table.html())) for table in section.more],  # noqa: S704 - escaped there
    }
