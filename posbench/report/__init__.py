"""`posbench report`: tables, curves and one self-contained page from run folders."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from posbench.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from posbench.report.comparison.load import Group, RunData
    from posbench.report.page import Section


def main(
    paths: list[Path],
    out: Path | None = None,
    least: float | None = None,
    columns: str | None = None,
    reference: str | None = None,
) -> None:
    """Report on run folders: tables in the terminal, and files in a folder.

    Args:
        paths: run folders, study folders, globs.
        out: folder for the files; default: `report` in the study's folder.
        least: nats per token; a smaller difference is not called better or worse. None: `claims.LEAST`.
        columns: of the LaTeX table, comma-separated. None: `latex.DEFAULT`.
        reference: name or label of the scheme that the others are compared with. None: `rope`, of tasks without it
            `none`.

    Raises:
        UserError: a path does not exist, nothing there is a run, no such column or scheme, or the files cannot be
            written.
    """
    from posbench.report import latex
    from posbench.report.comparison import claims, load
    from posbench.terminal import console as terminal

    latex.check(columns)

    runs, warnings = _read(paths)
    folder = out or Path(os.path.commonpath([run.folder.absolute().parent for run in runs])) / "report"
    warnings += load.mixed_code(runs)
    groups = load.groups(runs, reference)
    smallest = claims.LEAST if least is None else least
    console = terminal.stdout()
    if not console.is_terminal:
        console.width = max(console.width, 132)  # files and pipes have no fixed width
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with console.capture() as said:
            _write(folder, groups, runs, warnings, console, smallest, columns)
    except OSError as error:
        raise UserError(f"cannot write into {folder}: {error.strerror or error}") from None
    print(said.get(), end="")  # last, so that a printing error costs no file
    where = f"Report: {folder / 'index.html'} (also report.md, table.tex, curves.png and .pdf, CSV)"
    console.print(where, soft_wrap=True)


def _read(paths: list[Path]) -> "tuple[list[RunData], list[str]]":
    """Every run once, and warnings about runs left out."""
    from posbench.report.comparison import load
    from posbench.run_folder import finding

    runs, warnings = [], []
    for folder in finding.run_folders(paths):
        try:
            runs.append(load.read(folder))
        except UserError as error:
            warnings.append(f"Left out, unreadable: {error}")
    if not runs:
        raise UserError(f"none of the runs can be read: {warnings[0]}")
    runs.sort(key=lambda run: not run.done)
    twice = load.repeated(runs)
    warnings += [f"Left out: {run.folder} repeats a run of the same settings and seed" for run in twice]
    runs = [run for run in runs if run not in twice]
    if apart := [run for run in runs if run.apart]:
        names = ", ".join(sorted(set[str]().union(*(run.apart for run in apart))))
        warnings.append(
            f"Left out: rows on other targets than the curve of their run ({names}, of {len(apart)} of {len(runs)} "
            f"runs). 'posbench evaluate {apart[0].folder}' tells how to have all on the same targets"
        )
    return runs, warnings


def _write(
    folder: Path,
    groups: "list[Group]",
    runs: "list[RunData]",
    warnings: list[str],
    console: "Console",
    least: float,
    columns: str | None,
) -> None:
    """Write all files of a report; print the main tables."""
    from posbench.report import csv_files, page, tables, task, text
    from posbench.report.comparison import load

    if texts := [group for group in groups if group.task is None and group.settings]:
        keys = ", ".join(texts[0].settings)
        warnings = [f"Not all of these runs may be compared: they are in {len(texts)} sets by {keys}", *warnings]
    outcomes, title = tables.outcomes(runs), ", ".join(sorted({run.config.study for run in runs}))
    text.print_lines(console, [f"{title}: {outcomes}", *warnings])
    pieces = [f"# {text.markdown(title)}\n\n{text.markdown(outcomes)}\n"]
    pieces += [f"**{text.markdown(warning)}**\n" for warning in warnings]
    sections: list[Section] = []
    for number, (group, heading) in enumerate(zip(groups, _headings(groups), strict=True), start=1):
        place = folder
        if number > 1:
            place = folder / f"set-{number}"
            place.mkdir(exist_ok=True)
        if group.task is None:
            made = _section(group, heading, place, least, columns)
        else:
            made = task.section(group, heading, place)
        text.write(place / "table.tex", made.latex)
        _print(console, made, with_notes=all(made.on_task != other.on_task for other in sections))
        pieces.append(_markdown(made, folder))
        sections.append(made)
    failed = tables.not_done(load.failures(runs))
    text.print_lines(console, (": ".join(value.text for value in row if value.text) for row in failed.rows))
    pieces += [text.markdown_table(failed)] if failed.rows else []
    text.write(folder / "report.md", "\n".join(pieces))
    csv_files.write(folder, groups, runs)
    text.write(folder / "index.html", page.render(title, outcomes, warnings, sections, failed, runs))


def _section(group: "Group", heading: str, place: Path, least: float, columns: str | None) -> "Section":
    """The section of a set of runs on text: levels and rises of nll; its pictures are written into a folder."""
    from posbench.report import captions, figures, latex, on_the_way, page, tables
    from posbench.report.answer import answer
    from posbench.report.comparison import summary

    summaries = summary.summarise(group, least)
    caption, notes = captions.of_text(group, summaries), captions.notes_on_text(group)
    notes += latex.left_out(group, summaries, columns)
    title = f"{group.runs[0].config.study} {heading.partition(':')[0]}".strip()
    return page.Section(
        heading=heading,
        answer=answer(group, summaries),
        caption=caption,
        shown=tables.main_tables(group, summaries, least),
        more=[*tables.more_tables(group, summaries), *on_the_way.over_training(group, summaries)],
        notes=notes,
        latex=latex.table(group, summaries, columns, title, " ".join([caption, *notes])),
        pictures=figures.save(group, summaries, place),
        pictured="Curves of nll by context length",
    )


def _print(console: "Console", made: "Section", with_notes: bool) -> None:
    from posbench.report import text

    text.print_lines(console, [*([made.heading] if made.heading else []), *made.answer])
    for table in made.shown:
        text.print_table(console, table)
        text.print_lines(console, [table.note] if with_notes else [])
    text.print_lines(console, [*made.notes, made.caption])


def _markdown(made: "Section", folder: Path) -> str:
    from posbench.report import text

    pieces = [f"## {text.markdown(made.heading)}\n"] if made.heading else []
    pieces += [f"**{text.markdown(' '.join(made.answer))}**\n"] if made.answer else []
    pieces += [f"![{made.pictured}]({picture.relative_to(folder)})\n" for picture in made.pictures[:1]]
    pieces += [text.markdown(line) + "\n" for line in (made.caption, *made.notes)]
    return "\n".join([*pieces, *map(text.markdown_table, made.tables)])


def _headings(groups: "list[Group]") -> list[str]:
    """The heading of each group: `Set 2: data.sha256 c0ffee`, `Task copy`; empty for a single set of text."""
    texts, found = sum(group.task is None for group in groups), []
    for number, group in enumerate(groups, start=1):
        settings = ", ".join(f"{key} {value}" for key, value in group.settings.items())
        name = f"Task {group.task}" if group.task is not None else f"Set {number}" if texts > 1 else ""
        name = name or ("Text" if len(groups) > 1 else "")
        found.append(f"{name}: {settings}" if settings else name)
    return found
