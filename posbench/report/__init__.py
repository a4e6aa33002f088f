"""`posbench report`: a short answer, one table, a figure and one self-contained page from runs."""

import json
import os
import sys
import types
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posbench.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

    from posbench.report.charts import FigureKind
    from posbench.report.page import Section

WIDTH = 100  # characters, of files and pipes
MOST_LINES, LEAST_ROWS = 25, 6  # in the terminal; the page and the CSV file have all rows
NAME = "curves"  # .png, .pdf


def main(
    paths: list[Path],
    out: Path | None = None,
    least: float | None = None,
    columns: str | None = None,
    reference: str | None = None,
    figure: "FigureKind" = "panels",
) -> None:
    """Report on runs: a short answer and a table in the terminal, and files in a folder.

    Args:
        paths: run folders, study folders, globs, kept studies (`*.parquet`).
        out: folder for the files; default: `report` in the study's folder.
        least: nats per token; a smaller difference has no word. None: `compare.LEAST`.
        columns: of the LaTeX table, comma-separated. None: those of the terminal.
        reference: label or encoding that others are compared with. None: `rope`, of tasks without it `none`.
        figure: `panels`; `curve`: the loss by context alone, as wide as a column of a paper; `perplexity`: that of it.

    Raises:
        UserError: a path does not exist, nothing there is a run, no such column or scheme, or the files cannot be
            written.
    """
    from posbench.report import charts, page
    from posbench.report.render import csv_text
    from posbench.results import frame as frames
    from posbench.terminal import console as terminal

    frame = frames.read(paths)
    runs = frame.drop_duplicates("folder")
    if (runs["run_status"] == "unreadable").all():
        raise UserError(f"none of the runs can be read: {runs['run_reason'].iloc[0]}")
    folder = out or Path(os.path.commonpath([Path(run).absolute().parent for run in runs["folder"]])) / "report"
    warnings, sections = _warnings(frame, runs), _sections(frame, least, reference, figure)
    chosen = _chosen(columns, sections)
    title = ", ".join(sorted(set(runs["study"].dropna())))
    try:
        for number, section in enumerate(sections, start=1):
            place = folder if number == 1 else folder / f"set-{number}"
            place.mkdir(parents=True, exist_ok=True)
            if section.figure is not None:
                charts.save(section.figure, place, NAME)
            if section.main is not None:
                _write(place / "table.csv", section.main.csv())
                latex = section.main.selected(chosen) if chosen else section.main
                _write(place / "table.tex", latex.latex(f"posbench-{number}"))
        lists = [name for name in frame if name.startswith("unit_")]
        _write(folder / "rows.csv", csv_text(frame.drop(columns=[*lists, "settings", "scheme"])))
        _write(folder / "index.html", page.render(title, warnings, sections, runs))
    except OSError as error:
        raise UserError(f"cannot write into {folder}: {error.strerror or error}") from None

    console = terminal.stdout()
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    if any(section.figure is not None for section in sections):
        console.print(f"Figure: {folder / NAME}.png; page: {folder / 'index.html'}", soft_wrap=True)
    else:
        console.print(f"Page: {folder / 'index.html'}", soft_wrap=True)
    for line in warnings:
        console.print(line, soft_wrap=True)
    for section in sections:
        first = f"{section.heading}: {section.facts}" if section.heading else f"{title}: {section.facts}"
        above = [*warnings, first, *section.answer]
        for line in above[len(warnings) :]:
            sentence, _, command = line.partition("\n")
            console.print(sentence)
            if command:  # is copied in one piece
                console.print(command, soft_wrap=True)
        if section.main is not None:
            lines = 1 + sum(-(-len(part) // console.width) for line in above for part in line.split("\n  ")[:2])
            around = 3 + len(section.main.notes)  # head, rule, and how many rows are left out
            section.main.print(console, max(LEAST_ROWS, MOST_LINES - lines - around))


def _write(path: Path, text: str) -> None:
    from posbench import files

    files.write(path, text.encode())


def _warnings(frame: "pd.DataFrame", runs: "pd.DataFrame") -> list[str]:
    """Return lines on runs that are left out, failed, or differ in the code of an encoding."""
    from posbench.terminal.exits import plural

    lines = []
    counts = Counter(runs.loc[~runs["run_status"].isin(["done", "unreadable"]), "run_status"])
    if counts:
        reasons = [reason for reason in runs.loc[runs["run_status"] != "done", "run_reason"].dropna()]
        statuses = ", ".join(f"{number} {status}" for status, number in counts.most_common())
        first = f", the first: {' '.join(reasons[0].split())}" if reasons else ""
        lines.append(f"Of {plural(len(runs), 'run')} not done: {statuses}{first}")
    for run in runs[runs["run_status"] == "unreadable"].itertuples():
        lines.append(f"Left out, unreadable: {run.folder}: {run.run_reason}")
    if again := int(runs["repeated"].sum()):
        where = runs.loc[runs["repeated"], "folder"].iloc[0]
        lines.append(f"Left out: {plural(again, 'run')} of a setting and seed that another run has, as {where}")
    splits = frame[frame["main"]].groupby("folder")["split"].first()
    apart = frame[(frame["status"] == "ok") & ~frame["main"] & (frame["split"] == frame["folder"].map(splits))]
    if len(apart):
        number = f"{apart['folder'].nunique()} of {len(runs)} runs"
        lines.append(
            f"Left out: rows on other targets than the curve of their run, of {number}. "
            f"'posbench evaluate {apart['folder'].iloc[0]}' tells how to have all on the same targets"
        )
    versions: dict[str, set[str]] = {}
    for text in runs.loc[runs["run_status"] == "done", "installed_encodings"].dropna():
        for name, digest in json.loads(text).items():
            versions.setdefault(name, set()).add(digest)
    lines += [
        f"'{name}' was trained with {len(digests)} versions of its file: 'posbench train ... --restart' trains anew"
        for name, digests in versions.items()
        if len(digests) > 1
    ]
    return lines


def _sections(
    frame: "pd.DataFrame", least: float | None, reference: str | None, figure: "FigureKind"
) -> "list[Section]":
    """Return a section for each set of runs that may be compared: text first, then those with most results."""
    from posbench.results.frame import differing_settings

    readable = frame[frame["run_status"] != "unreadable"]
    sets = [same for _, same in readable.groupby("setting")]
    sets.sort(
        key=lambda same: (same["trained_task"].iloc[0] or "", not same["newest"].any(), -same["folder"].nunique())
    )
    if reference is not None:
        known = {*readable["label"], *readable["encoding"].dropna()}
        if reference not in known:
            raise UserError(f"no scheme is called '{reference}': expected one of {', '.join(sorted(known))}")
    settings: dict[str, dict[str, str]] = {}
    for _, alike in readable.groupby(readable["trained_task"].fillna("")):
        settings |= differing_settings(alike)
    sections = []
    for number, same in enumerate(sets, start=1):
        task, setting = same["trained_task"].iloc[0], str(same["setting"].iloc[0])
        apart = ", ".join(f"{key} {value}" for key, value in settings.get(setting, {}).items())
        name = f"Task {task}" if task else f"Set {number}" if len(sets) > 1 else ""
        heading = f"{name}: {apart}" if apart else name
        there = reference if reference in {*same["label"], *same["encoding"]} else None
        section = _of_task(same, heading, there) if task else _of_text(same, heading, there, least, figure)
        sections.append(section)
    return sections


def _of_text(
    frame: "pd.DataFrame", heading: str, reference: str | None, least: float | None, figure: "FigureKind"
) -> "Section":
    from posbench.report import answer, charts, tables
    from posbench.report.page import Section
    from posbench.results import compare

    table = compare.compare(frame, reference, compare.LEAST if least is None else least)
    more = [tables.facts_table(table)]
    if "nll_difference" in table:
        more.insert(0, tables.differences_table(table))
    if training := tables.training_table(frame):
        more.append(training)
    return Section(
        heading,
        answer.facts(frame),
        answer.of_text(frame, table),
        charts.of_text(frame, table, figure),
        tables.main_table(table),
        [*more, *tables.other_tables(frame)],
    )


def _of_task(frame: "pd.DataFrame", heading: str, reference: str | None) -> "Section":
    from posbench.report import answer, charts, tables
    from posbench.report.page import Section
    from posbench.results.tasks import compare_tasks

    table = compare_tasks(frame, reference)
    main, more = (tables.task_table(table), [tables.places_table(frame)]) if len(table) else (None, [])
    sentences = answer.of_task(frame, table)
    return Section(
        heading, answer.facts(frame), sentences, charts.of_task(frame), main, [*more, *tables.other_tables(frame)]
    )


def _chosen(columns: str | None, sections: "list[Section]") -> list[str]:
    """Return the names of the LaTeX table's columns.

    Raises:
        UserError: no table has one of these columns.
    """
    chosen = [name.strip() for name in columns.split(",")] if columns else []
    known = dict.fromkeys(column.name for section in sections if section.main for column in section.main.columns)
    for name in chosen:
        if name not in known:
            raise UserError(f"no column is called '{name}': expected some of {', '.join(known)}")
    return chosen


class _Callable(types.ModuleType):
    """The module as `posbench.report(...)`, the command from Python."""

    def __call__(self, *paths: str | Path, out: str | Path | None = None, **options: Any) -> None:
        """Report on runs as `main` does."""
        main([Path(path) for path in paths], None if out is None else Path(out), **options)


sys.modules[__name__].__class__ = _Callable
