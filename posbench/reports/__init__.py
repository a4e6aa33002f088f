"""`posbench report`: a short answer, one table, a figure and one self-contained page
from runs.
"""

import dataclasses
import json
import os
from collections import ChainMap, Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

import posbench
from posbench import files
from posbench.errors import UserError
from posbench.reports import answer, card, tables
from posbench.reports.render import Table, csv_text
from posbench.results import compare, tasks
from posbench.results.frame import read
from posbench.results.settings import differing_settings
from posbench.terminal import console as terminal
from posbench.terminal.exits import plural

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from posbench.reports.charts import FigureKind

WIDTH = 100  # characters in files and pipes
MOST_ROWS = 8  # in the terminal; the page and the CSV file have all


@dataclasses.dataclass(frozen=True)
class Section:
    """The report on one set of runs that may be compared."""

    heading: str
    facts: str  # what was run
    answer: Sequence[str]
    figure: "Figure | None"
    main: Table | None  # None: nothing was measured
    more: Sequence[Table]  # folded away in the page, absent in the terminal


def main(
    paths: Sequence[str | Path],
    out: str | Path | None = None,
    least: float | None = None,
    reference: str | None = None,
    figure: "FigureKind" = "panels",
) -> None:
    """Report on runs: a short answer and a table in the terminal, and files in a
    folder.

    Args:
        paths: run folders, study folders, globs, kept studies (`*.parquet`).
        out: folder for the files; None: `report` in the study's folder.
        least: the smallest difference, in nats per token, that gets a word; None:
            `compare.LEAST`.
        reference: label or encoding that others are compared with. None: `rope`, or
            `none` on tasks without it.
    """
    from posbench.reports import charts

    frame = read(map(Path, paths))
    runs, readable = (
        frame.drop_duplicates("folder"),
        frame[frame["run_status"] != "unreadable"],
    )
    if not len(readable):
        raise UserError(f"none of the runs can be read: {runs['run_reason'].iloc[0]}")
    if out is None:
        studies = [Path(run).absolute().parent for run in runs["folder"]]
        folder = Path(os.path.commonpath(studies), "report")
    else:
        folder = Path(out)
    title, warnings = (
        ", ".join(sorted(set(runs["study"].dropna()))),
        _warnings(frame, runs),
    )
    compare.reference_label(readable, reference)  # refuses an unknown one
    sections = _sections(readable, least, reference, figure)
    for number, section in enumerate(sections, start=1):
        target = folder if number == 1 else folder / f"set-{number}"
        if section.figure:
            for kind in ("png", "pdf"):
                files.write(
                    target / f"curves.{kind}", charts.drawn(section.figure, kind)
                )
        if section.main:
            files.write(target / "table.csv", csv_text(section.main.frame).encode())
            files.write(
                target / "table.tex", section.main.latex(f"posbench-{number}").encode()
            )
    files.write(
        folder / "rows.csv",
        csv_text(
            frame.loc[:, ~frame.columns.str.match("unit_|settings|scheme")]
        ).encode(),
    )
    files.write(folder / "index.html", _page(title, warnings, sections, runs).encode())

    console = terminal.stdout()
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    label = f"Figure: {folder / 'curves.png'}; page" if sections[0].figure else "Page"
    for line in (f"{label}: {folder / 'index.html'}", *warnings):
        console.print(line, soft_wrap=True)
    for section in sections:
        for line in (f"{section.heading or title}: {section.facts}", *section.answer):
            sentence, _, command = line.partition("\n")
            console.print(sentence)
            if command:  # on one line, so that it can be copied
                console.print(command, soft_wrap=True)
        if section.main:
            section.main.print(console, MOST_ROWS)


def _warnings(frame: pd.DataFrame, runs: pd.DataFrame) -> list[str]:
    """Return lines on runs that are left out, failed, or differ in the code of an
    encoding.
    """
    lines, not_done = [], runs[~runs["run_status"].isin(["done", "unreadable"])]
    if len(not_done):
        statuses = ", ".join(
            f"{number} {status}"
            for status, number in not_done["run_status"].value_counts().items()
        )
        first_reason = "".join(
            f", the first: {' '.join(why.split())}"
            for why in not_done["run_reason"].dropna()[:1]
        )
        lines.append(
            f"Of {plural(len(runs), 'run')} not done: {statuses}{first_reason}"
        )
    for run in runs[runs["run_status"] == "unreadable"].itertuples():
        lines.append(f"Left out, unreadable: {run.folder}: {run.run_reason}")
    if len(copies := runs.loc[runs["repeated"], "folder"]):
        lines.append(
            f"Left out: {plural(len(copies), 'run')} with the setting and seed of"
            f" another: {copies.iloc[0]}"
        )
    splits = frame[frame["main"]].groupby("folder")["split"].first()
    elsewhere = (
        (frame["status"] == "ok")
        & ~frame["main"]
        & (frame["split"] == frame["folder"].map(splits))
    )
    if number := frame.loc[elsewhere, "folder"].nunique():
        lines.append(
            f"Left out: rows on other targets than the curve of their run, of {number}"
            f" of {len(runs)} runs"
        )
    for _, group in (
        compare.main_rows(frame)
        .query("curve == 'fixed_target' and status == 'ok'")
        .groupby("setting")
    ):
        shared = (
            group["targets_sha256"]
            == group.query("length_ratio == 1")["targets_sha256"].mode().max()
        )
        if len(outliers := group[~shared].query("length_ratio == 1")["folder"]):
            ratios = [
                f"{ratio:g}" for ratio in sorted(group["length_ratio"][shared].unique())
            ]
            hint = (
                f"'posbench evaluate {outliers.iloc[0]} ratio={','.join(ratios)}"
                f" longest={ratios[-1]}' computes them"
            )
            lines.append(
                f"Left out: {plural(len(outliers), 'run')} without the targets that"
                f" most share: {hint}"
            )
    installed = (
        runs.loc[runs["run_status"] == "done", "installed_encodings"]
        .dropna()
        .map(json.loads)
    )
    versions = Counter(
        name for name, _ in {pair for digests in installed for pair in digests.items()}
    )
    advice = "versions of its file: 'posbench train ... --restart' trains anew"
    return lines + [
        f"'{name}' was trained with {count} {advice}"
        for name, count in versions.items()
        if count > 1
    ]


def _sections(
    frame: pd.DataFrame,
    least: float | None,
    reference: str | None,
    figure: "FigureKind",
) -> list[Section]:
    """Return a section for each set of runs that may be compared: text before tasks,
    then sets with more runs first.
    """
    from posbench.reports import charts

    sets = [group for _, group in frame.groupby("setting")]
    sets.sort(
        key=lambda df: (
            df["trained_task"].iloc[0] or "",
            not df["newest"].any(),
            -df["folder"].nunique(),
        )
    )
    by_task = frame.groupby(frame["trained_task"].fillna(""))
    settings = ChainMap(*(differing_settings(of_task) for _, of_task in by_task))
    sections = []
    for number, group in enumerate(sets, start=1):
        task, facts = group["trained_task"].iloc[0], answer.facts(group)
        name = f"Task {task}" if task else f"Set {number}" if len(sets) > 1 else ""
        differences = ", ".join(
            map(" ".join, settings.get(group["setting"].iloc[0], {}).items())
        )
        heading = f"{name}: {differences}" if differences else name
        base = reference if reference in {*group["label"], *group["encoding"]} else None
        if task:
            table = tasks.compare_tasks(group, base)
            main, more, picture = (
                tables.task_table(table) if len(table) else None,
                [],
                charts.of_task(group),
            )
            sentences = answer.of_task(group, table)
        else:
            table = compare.compare(
                group, base, compare.LEAST if least is None else least
            )
            more = [
                card.card_table(group, table),
                tables.facts_table(table),
                *tables.training_tables(group),
            ]
            main, sentences = tables.main_table(table), answer.of_text(group, table)
            picture = charts.of_text(group, table, figure)
        sections.append(
            Section(
                heading,
                facts,
                sentences,
                picture,
                main,
                [*more, *tables.by_length(group)],
            )
        )
    return sections


def _page(
    title: str, warnings: Sequence[str], sections: Sequence[Section], runs: pd.DataFrame
) -> str:
    """Return the report as one HTML file that needs no network; jinja or `Table`
    escapes what a run folder holds.
    """
    import jinja2

    from posbench.reports import charts

    template, style = (
        Path(__file__).with_name(name).read_text("utf-8")
        for name in ("page.html.jinja", "page.css")
    )
    return str(
        jinja2.Template(
            template, autoescape=True, undefined=jinja2.StrictUndefined
        ).render(
            title=title,
            warnings=warnings,
            sections=sections,
            inline=charts.inline,
            style=style,
            runs=runs[["run", "run_status", "run_reason", "command"]]
            .astype("object")
            .fillna("")
            .to_dict("records"),
            version=posbench.__version__,
        )
    )
