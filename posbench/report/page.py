"""The report as one HTML file that needs no network and trusts no name in it.

Everything from a run folder is escaped: as text by jinja's autoescaping, as data by writing `<`, `>` and `&` as JSON
escapes. The page's policy allows the one script and the one style below by their hashes, and nothing else at all.
"""

import base64
import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import jinja2
import yaml
from markupsafe import Markup

import posbench
from posbench.config.history import without_neutral
from posbench.config.schema import to_container
from posbench.evaluation.intervals import Interval
from posbench.report import families, lines, styles
from posbench.report.comparison.load import Group, RunData
from posbench.report.comparison.summary import Curve, Point, Summary
from posbench.report.styles import DASHES, Style
from posbench.report.tables import Table
from posbench.run_folder.redaction import redact
from posbench.run_folder.rows import PLAIN, WINDOWED
from posbench.terminal.exits import one_line

_HERE = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Part:
    """One group of comparable runs on the page."""

    heading: str
    answer: list[str]
    caption: str
    tables: list[Table]
    notes: list[str]
    data: Markup  # the curves
    on_task: bool = False

    @property
    def views(self) -> list[tuple[str, str]]:
        """The views of the curves: key in `data`, and name."""
        if self.on_task:
            return [("level", "answer tokens"), ("exact", "whole answers")]
        return [("level", "level"), ("rise", "rise against 1x")]

    @property
    def shows(self) -> str:
        return "accuracy against problem length" if self.on_task else "nll against context length"


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of the page with what is written beside the page."""

    part: Part
    shown: int  # of its tables, those that the terminal has, too: the first ones
    latex: str  # its table for a paper
    pictures: list[Path]
    shows: str  # what the pictures do, in words


def render(
    title: str,
    outcomes: str,
    warnings: list[str],
    parts: list[Part],
    properties: Table,
    failed: Table,
    runs: list[RunData],
) -> str:
    """The whole page."""
    script, sheet = (_own(name) for name in ("page.js", "page.css"))
    task_script = _own("task.js") if any(part.on_task for part in parts) else Markup()
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=False)
    environment.filters |= {"line": one_line, "keep_indent": _keep_indent}
    template = environment.from_string((_HERE / "page.html.jinja").read_text(encoding="utf-8"))
    return template.render(
        title=title,
        outcomes=outcomes,
        warnings=warnings,
        parts=parts,
        properties=properties,
        failed=failed,
        runs=[_run(run) for run in runs],
        version=posbench.__version__,
        script=script,
        script_hash=_hash(script),
        task_script=task_script,
        task_script_hash=_hash(task_script),
        style=sheet,
        style_hash=_hash(sheet),
    )


def curves(group: Group, summaries: list[Summary], baseline: Summary | None) -> Markup:
    """The curves of a group as JSON that can stand inside a script element."""
    lengths = {point.ratio: point.length for one in summaries for curve in one.curves for point in curve.points}
    looks = styles.assign((scheme.name, scheme.label) for scheme in group.schemes)
    outside = lines.outside(group, summaries)
    series = [
        _series(one, curve, looks[one.scheme.label], one is baseline)
        | {"family": family, "outside": one.scheme.label in outside}
        for family, members in families.rows(summaries)
        for one in members
        for curve in one.curves
    ]
    series.sort(key=lambda one: one["mark"] is None)  # the plain curves first
    data = {
        "train_length": group.train_length,
        "lengths": [{"ratio": ratio, "length": length} for ratio, length in sorted(lengths.items())],
        "series": [one for one in series if one["points"]],
    }
    return as_script_data(data)


def as_script_data(data: Any) -> Markup:
    """JSON without a character that could end a script element or begin anything in HTML."""
    text = json.dumps(data, allow_nan=False)  # ASCII only, so U+2028 is escaped, too
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))  # noqa: S704


def _series(one: Summary, curve: Curve, look: Style, is_baseline: bool) -> dict[str, Any]:
    plain = curve.kind == PLAIN
    points = [point for point in _with_start(one, curve) if point.nll is not None]
    return {
        "label": one_line(_label(one, curve)),
        "colour": look.colour,
        "ink": f"var(--ink-{styles.COLOURS.index(look.colour)})",  # page.css has each for light and for dark
        "mark": look.mark if plain else None,
        "dash": look.dash if plain else DASHES[1] if curve.kind == WINDOWED else DASHES[2],
        "on": plain or (curve.kind == WINDOWED and is_baseline),
        "undefined_at": curve.undefined_at if plain else None,
        "points": [_point(point, one.bimodal, plain) for point in points],
    }


def _with_start(one: Summary, curve: Curve) -> list[Point]:
    """A curve's points; one that was not measured at the training length starts where the plain curve does."""
    if any(point.ratio == 1 for point in curve.points):
        return curve.points
    return [*(point for point in one.plain.points if point.ratio == 1), *curve.points]


def _point(point: Point, every_seed: bool, plain: bool) -> dict[str, Any]:
    """Means with their intervals; where seeds part ways the values of each instead, which an interval would blur."""
    band, rise = (None, None) if every_seed else (point.band, point.rise)
    seeds = {"level": list(point.levels.values()), "rise": list(point.rises.values())}
    return {
        "ratio": point.ratio,
        "length": point.length,
        "level": _numbers(point.nll, band),
        "rise": _numbers(point.rise.mean, rise) if point.rise else None,
        "seeds": seeds if every_seed and plain else None,
    }


def _label(one: Summary, curve: Curve) -> str:
    if curve.kind != PLAIN:
        return f"{one.scheme.label}, {curve.kind}"
    return f"{one.scheme.label} (every seed)" if one.bimodal else one.scheme.label


def _numbers(mean: float | None, band: Interval | None) -> list[float] | None:
    if mean is None:
        return None
    return [mean, band.low, band.high] if band else [mean]


def _run(run: RunData) -> dict[str, Any]:
    record = run.record
    plain = yaml.safe_dump(without_neutral(to_container(run.config)), sort_keys=False, allow_unicode=True)
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
        "config": redact(plain).splitlines(),
    }


def _keep_indent(text: str) -> str:
    stripped = text.lstrip(" ")
    return " " * (len(text) - len(stripped)) + one_line(stripped)


def _own(name: str) -> Markup:
    return Markup((_HERE / name).read_text(encoding="utf-8"))  # noqa: S704 - a file of this package


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
