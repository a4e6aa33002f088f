"""The report as one HTML file that needs no network. Everything from a run folder is escaped by jinja."""

import base64
import dataclasses
from pathlib import Path
from typing import Any

import jinja2
import yaml
from markupsafe import Markup

import posbench
from posbench.config.history import without_neutral
from posbench.config.schema import to_container
from posbench.report.comparison.load import RunData
from posbench.report.tables import Table

_HERE = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Section:
    """One group of comparable runs: its section of the page, and what is written beside the page."""

    heading: str
    answer: list[str]
    caption: str
    shown: list[Table]  # in the terminal, too
    more: list[Table]
    notes: list[str]
    latex: str  # the table for a paper
    pictures: list[Path]
    pictured: str  # what the pictures show, in words
    on_task: bool = False

    @property
    def embedded(self) -> str | None:
        """The SVG among the pictures, as the address of an image."""
        for path in self.pictures:
            if path.suffix == ".svg":
                return f"data:image/svg+xml;base64,{base64.b64encode(path.read_bytes()).decode()}"
        return None

    @property
    def tables(self) -> list[Table]:
        return [*self.shown, *self.more]


def render(
    title: str,
    outcomes: str,
    warnings: list[str],
    sections: list[Section],
    failed: Table,
    runs: list[RunData],
) -> str:
    """The whole page."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=False)
    template = environment.from_string((_HERE / "page.html.jinja").read_text(encoding="utf-8"))
    return template.render(
        title=title,
        outcomes=outcomes,
        warnings=warnings,
        sections=sections,
        failed=failed,
        runs=[_run(run) for run in runs],
        version=posbench.__version__,
        script=_own("tables.js"),
        style=_own("page.css"),
    )


def _run(run: RunData) -> dict[str, Any]:
    record = run.record
    config = to_container(run.config)
    short = without_neutral(config) | {"encoding": config["encoding"]}  # its defaults may have changed since
    plain = yaml.safe_dump(short, sort_keys=False, allow_unicode=True)
    versions, git = record.get("versions"), record.get("git")
    facts = {
        **(versions if isinstance(versions, dict) else {}),
        "commit": git.get("commit") if isinstance(git, dict) else None,
        "train_seconds": record.get("train_seconds"),
        "cpu_seconds": record.get("cpu_seconds"),
        "peak_memory_bytes": record.get("peak_memory_bytes"),
    }
    return {
        "name": run.folder.name,
        "outcome": run.outcome,
        "message": str(record.get("message") or ""),
        "command": str(record.get("command") or ""),
        "facts": ", ".join(f"{key} {value}" for key, value in facts.items() if value is not None),
        "config": plain,
    }


def _own(name: str) -> Markup:
    return Markup((_HERE / name).read_text(encoding="utf-8"))  # noqa: S704 - a file of this package
