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
from posbench.report import chart, families, lines, styles
from posbench.report.chart import Axes, Dot, Series
from posbench.report.comparison.judgement import SeedRange
from posbench.report.comparison.load import Group, RunData
from posbench.report.comparison.summary import Curve, Point, Summary
from posbench.report.styles import DASHES, Style
from posbench.report.tables import Table
from posbench.run_folder.rows import PLAIN, WINDOWED

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
    chart: Markup  # its specification
    latex: str  # the table for a paper
    pictures: list[Path]
    pictured: str  # what the pictures show, in words
    on_task: bool = False
    over_training: Markup | None = None  # the specification of a second chart

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
    script, sheet = _own("tables.js") + Markup(chart.script()), _own("page.css")  # noqa: S704 - no word of a run folder
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
        script=script,
        script_hash=_hash(script),
        style=sheet,
        style_hash=_hash(sheet),
    )


def curves(group: Group, summaries: list[Summary], baseline: Summary | None) -> Markup:
    """The chart of a group on text, as JSON that can stand inside a script element."""
    looks = styles.assign((scheme.name, scheme.label) for scheme in group.schemes)
    outside = lines.outside(group, summaries)
    shown = [one for _, members in families.rows(summaries) for one in members]
    series = [
        _series(one, curve, looks[one.scheme.label], one is baseline, one.scheme.label in outside)
        for one in shown
        for curve in one.curves
    ]
    axes = Axes(
        {"level": "level", "rise": "rise against 1x"},
        "nll, nats per token",
        "context, tokens (log scale)",
        f"trained at {group.train_length}",
        before=(before / group.train_length, f"before at {before}") if (before := group.original_length) else None,
    )
    return as_script_data(chart.spec(sorted(series, key=lambda one: not one.style.mark), axes))


def as_script_data(data: Any) -> Markup:
    """JSON without a character that could end a script element or begin anything in HTML."""
    text = json.dumps(data, allow_nan=False)  # ASCII only, so U+2028 is escaped, too
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))  # noqa: S704


def _series(one: Summary, curve: Curve, look: Style, is_baseline: bool, is_outside: bool) -> Series:
    plain = curve.kind == PLAIN
    dash = look.dash if plain else DASHES[1] if curve.kind == WINDOWED else DASHES[2]
    points = [point for point in one.with_start(curve) if point.nll is not None]
    dots = {"level": [], "rise": []}  # type: dict[str, list[Dot]]
    for point in points:
        if one.bimodal and plain:  # an interval would blur seeds that part ways
            for view, values in (("level", point.levels), ("rise", point.rises)):
                dots[view] += [Dot(point.ratio, point.length, value, seed=seed) for seed, value in values.items()]
            continue
        dots["level"].append(_dot(point, point.nll, point.band))
        if point.rise:
            dots["rise"].append(_dot(point, point.rise.mean, point.rise))
    label = _label(one, curve)
    is_on = plain or (curve.kind == WINDOWED and is_baseline)
    undefined_at = curve.undefined_at if plain else None
    style = Style(look.colour, look.mark if plain else "", dash)
    return Series(label, style, dots, is_on, is_outside, undefined_at=undefined_at)


def _dot(point: Point, value: float | None, interval: Interval | None) -> Dot:
    assert value is not None
    if interval is None:
        return Dot(point.ratio, point.length, value)
    between = "range of seeds" if isinstance(interval, SeedRange) else "95 %"
    return Dot(point.ratio, point.length, value, (interval.low, interval.high), between=between)


def _label(one: Summary, curve: Curve) -> str:
    if curve.kind != PLAIN:
        return f"{one.scheme.label}, {curve.kind}"
    return f"{one.scheme.label} (every seed)" if one.bimodal else one.scheme.label


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


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
