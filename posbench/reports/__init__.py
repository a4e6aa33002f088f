"""`posbench report`: a short answer, one table, a figure and one self-contained page
from runs; another page to look at three schemes or more.
"""

import dataclasses
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

import posbench
from posbench import files
from posbench.errors import UserError
from posbench.reports import answer, decision, tables
from posbench.reports.render import Table, csv_text, page_html
from posbench.results import compare, tasks, words
from posbench.results.frame import read
from posbench.results.settings import differing_settings
from posbench.run.rows import PLAIN
from posbench.terminal import console as terminal
from posbench.terminal.console import plural
from posbench.terminal.exits import is_quiet

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

    from posbench.reports.charts import FigureKind

WIDTH = 100  # characters in files and pipes
EXPLORED = "explore.html"  # beside the page
FEWEST = 3  # schemes, below which a map of them says nothing
MOST_ROWS = 8  # in the terminal; the page and the CSV file have all


@dataclasses.dataclass(frozen=True)
class Section:
    """The report on one set of runs that may be compared."""

    heading: str
    facts: str  # what was run
    answer: answer.Answer
    figure: "Figure | None"
    panels: Sequence["Figure"]  # the figure in parts, which a page stacks
    main: Table | None  # None: nothing was measured
    columns: pd.DataFrame  # the comparison as plain values, for table.csv
    by_length: Table | None  # the losses of the main protocol
    more: Sequence[Table]
    variants: Table | None = None  # what each extension adds
    explored: str = ""  # the page on which its schemes are looked at

    @property
    def folded(self) -> list[Table]:
        """Tables that are folded away in the page and absent in the terminal."""
        first = [self.variants, self.by_length]
        return [*filter(None, first), *self.more]

    @classmethod
    def of_text(
        cls,
        heading: str,
        group: pd.DataFrame,
        reference: str | None,
        least: float,
        figure: "FigureKind",
        variant: str,
    ) -> "Section":
        """Compare runs on a text; `least`: the smallest difference that gets a word;
        `variant`: what extensions are compared with.
        """
        from posbench.reports import charts

        losses = compare.Losses.of(group)
        comparison = compare.compare(group, reference, least, losses)
        curves = compare.curves(losses)
        by_length = None
        if comparison.measured:
            by_length = tables.loss_table(losses, comparison)
        more = [decision.card_table(group, comparison), tables.facts_table(comparison)]
        more += tables.training_tables(group)
        more += tables.length_tables(group)
        panels = charts.text_panels(curves, comparison, figure)
        whole = None
        if panels:
            whole = charts.panels_figure(panels, figure)
        explored = ""
        if len(comparison.measured) >= FEWEST:
            from posbench.reports import explore  # it imports Bokeh

            explored = explore.explore_html(heading or "Schemes", comparison, curves)
        return cls(
            heading,
            answer.facts_line(group),
            answer.text_answer(group, comparison),
            whole,
            [charts.panels_figure([panel], figure) for panel in panels],
            tables.main_table(comparison),
            comparison.frame,
            by_length,
            more,
            tables.variant_table(losses, comparison, variant),
            explored,
        )

    @classmethod
    def of_task(
        cls, heading: str, group: pd.DataFrame, reference: str | None
    ) -> "Section":
        """Compare runs on a task."""
        from posbench.reports import charts

        comparison = tasks.compare_tasks(group, reference)
        figure = charts.task_figure(group)
        figures = []
        if figure:
            figures.append(figure)
        main = None
        columns = pd.DataFrame()
        if comparison:
            main = tables.task_table(comparison)
            columns = comparison.frame
        return cls(
            heading,
            answer.facts_line(group),
            answer.task_answer(group, comparison),
            figure,
            figures,
            main,
            columns,
            None,
            tables.length_tables(group),
        )

    def write(self, folder: Path, number: int) -> None:
        """Write the figure and the table into a folder."""
        from posbench.reports import charts

        if self.figure:
            for kind in ("png", "pdf"):
                picture = charts.image_bytes(self.figure, kind)
                files.write(folder / f"curves.{kind}", picture)
        if self.explored:
            files.write(folder / EXPLORED, self.explored.encode())
        if self.main:
            latex = self.main.latex(f"posbench-{number}")
            if self.by_length:
                latex += "\n" + self.by_length.latex(f"posbench-{number}-lengths")
            files.write(folder / "table.csv", csv_text(self.columns).encode())
            files.write(folder / "table.tex", latex.encode())

    def print(self, console: "Console", title: str) -> None:
        """Print what was run, the answer and the table, unless the command is quiet;
        `title`: of the report.
        """
        if is_quiet():
            return
        console.print(f"{self.heading or title}: {self.facts}")
        for sentence in self.answer.sentences:
            console.print(sentence)
        if self.answer.command:  # on one line, so that it can be copied
            console.print(f"  {self.answer.command}", soft_wrap=True)
        if self.answer.time:
            console.print(self.answer.time)
        if self.main:
            self.main.print(console, MOST_ROWS)
        if self.variants:
            self.variants.print(console, 2 * MOST_ROWS)


def main(
    paths: Sequence[str | Path],
    out: str | Path | None = None,
    least: float | None = None,
    reference: str | None = None,
    figure: "FigureKind" = "panels",
    as_json: bool = False,
) -> None:
    """Report on runs: a short answer and a table in the terminal, and files in a
    folder.

    Args:
        paths: run folders, study folders, globs, kept studies (`*.parquet`).
        out: folder for the files; None: `report` in the study's folder.
        least: the smallest difference, in nats per token, that gets a word; None:
            `words.LEAST`.
        reference: label or encoding that others are compared with, or an extension
            that the others are. None: `rope`, or `none` on tasks without it.
        as_json: print the answer and the schemes as JSON; warnings go to stderr.
    """
    from posbench.reports import charts

    frame = read(map(Path, paths))
    runs = frame.drop_duplicates("folder")
    readable = frame[frame["run_status"] != "unreadable"]
    if not len(readable):
        raise UserError(f"none of the runs can be read: {runs['run_reason'].iloc[0]}")
    variant = PLAIN
    if reference in set(readable["variant"]):
        variant, reference = str(reference), None
    compare.reference_label(readable, reference)  # refuses an unknown one
    if least is None:
        least = words.LEAST
    if not least >= 0:
        raise UserError(f"least is {least}: expected 0 or more nats per token")

    title = ", ".join(sorted(set(runs["study"].dropna())))
    warnings = _warning_lines(frame, runs)
    sections = _sections(readable, least, reference, figure, variant)

    if out is None:
        studies = [Path(run).absolute().parent for run in runs["folder"]]
        folder = Path(os.path.commonpath(studies), "report")
    else:
        folder = Path(out)
    for number, section in enumerate(sections, start=1):
        # those of the first stand in the folder itself
        section.write(folder if number == 1 else folder / f"set-{number}", number)
    details = frame.columns.str.match("unit_|settings|scheme")
    files.write(folder / "rows.csv", csv_text(frame.loc[:, ~details]).encode())
    listed = runs[["run", "run_status", "run_reason", "command"]]
    page = page_html(
        "page.html.jinja",
        title=title,
        warnings=warnings,
        sections=sections,
        inline_svg=charts.inline_svg,
        runs=listed.astype("object").fillna("").to_dict("records"),
        version=posbench.__version__,
    )
    files.write(folder / "index.html", page.encode())

    label = "Page"
    if sections[0].figure:
        label = f"Figure: {folder / 'curves.png'}; page"
    lines = [f"{label}: {folder / 'index.html'}", *warnings]
    if as_json:
        for line in lines:  # stdout is for the JSON alone
            terminal.stderr.print(line, soft_wrap=True)
        print_json(folder, title, sections)
    else:
        print_words(lines, title, sections)


def print_words(lines: Sequence[str], title: str, sections: Sequence[Section]) -> None:
    """Print these lines, then sections as words and tables."""
    console = terminal.stdout()
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    for line in lines:
        console.print(line, soft_wrap=True)
    for section in sections:
        section.print(console, title)


def print_json(folder: Path, title: str, sections: Sequence[Section]) -> None:
    """Print a report as JSON: its folder, the lines of its answer, and a record per
    scheme with the columns of its set's table.csv.
    """
    lines = list[str]()
    schemes = []
    for number, section in enumerate(sections, start=1):
        lines += [f"{section.heading or title}: {section.facts}", *section.answer.lines]
        text = section.columns.to_json(orient="records", double_precision=15)
        for record in json.loads(text):  # there NaN is null
            schemes.append({"set": number, **record})
    document = {"report": str(folder), "answer": lines, "schemes": schemes}
    print(json.dumps(document, indent=2, ensure_ascii=False))


def _warning_lines(frame: pd.DataFrame, runs: pd.DataFrame) -> list[str]:
    """Return lines on runs that are left out, failed, or differ in the code of an
    encoding.
    """
    lines = []
    unreadable = runs[runs["run_status"] == "unreadable"]
    not_done = runs[~runs["run_status"].isin(["done", "unreadable"])]
    if len(not_done):  # `2 failed, 1 stopped; RUN: out of memory`
        counts = not_done["run_status"].value_counts()
        endings = ", ".join(f"{number} {status}" for status, number in counts.items())
        line = f"Of {plural(len(runs), 'run')} not done: {endings}"
        explained = not_done.dropna(subset="run_reason")
        if len(explained):
            first = explained.iloc[0]
            line += f"; {first['run']}: {' '.join(first['run_reason'].split())}"
        lines.append(line)
    for folder, reason in zip(
        unreadable["folder"], unreadable["run_reason"], strict=True
    ):
        lines.append(f"Left out, unreadable: {folder}: {reason}")

    copies = runs.loc[runs["repeated"], "folder"]
    if len(copies):
        lines.append(
            f"Left out: {plural(len(copies), 'run')} with the setting and seed of"
            f" another: {copies.iloc[0]}"
        )
    lines += _target_lines(frame)

    # encodings from outside of posbench whose code differs between runs
    digests: dict[str, set[str]] = {}
    installed = runs.loc[runs["run_status"] == "done", "installed_encodings"]
    for text in installed.dropna():
        for name, digest in json.loads(text).items():
            digests.setdefault(name, set()).add(digest)
    for name, versions in digests.items():
        if len(versions) > 1:
            lines.append(
                f"'{name}' was trained with {len(versions)} versions of its file:"
                " 'posbench train ... --restart' trains anew"
            )
    return lines


def _target_lines(frame: pd.DataFrame) -> list[str]:
    """Return a line for each setting of which runs lack the targets, or the precision,
    that most share at its longest length, with the command that evaluates all runs so.
    """
    is_done = (frame["run_status"] == "done") & ~frame["repeated"]
    rows = frame[is_done & (frame["curve"] == "fixed_target")]
    lines = []
    for _, group in rows.groupby("setting"):
        longest = group["length_ratio"].max()
        at_longest = group[group["length_ratio"] == longest]
        measured_on = at_longest["targets_sha256"] + at_longest["dtype"]
        is_alike = measured_on == measured_on.mode().max()
        has_them = is_alike | (at_longest["status"] != "ok")

        n_runs = group["folder"].nunique()
        n_lacking = n_runs - at_longest.loc[has_them, "folder"].nunique()
        if n_lacking:
            asked_ratios = sorted({1.0, *group["length_ratio"]})
            ratios = [f"{ratio:g}" for ratio in asked_ratios]
            studies = sorted({str(Path(folder).parent) for folder in group["folder"]})
            words = [f"ratio={','.join(ratios)}", f"longest={ratios[-1]}"]
            what = "targets"
            if at_longest["dtype"].nunique() > 1:
                what = "targets and the precision"
                words.append(f"precision={at_longest.loc[is_alike, 'dtype'].iloc[0]}")
            command = shlex.join(["posbench", "evaluate", *studies, *words])
            lines.append(
                f"{n_lacking} of {plural(n_runs, 'run')} without the {what} of"
                f" {ratios[-1]}x that others have: '{command}' computes them"
            )
    return lines


def _sections(
    frame: pd.DataFrame,
    least: float,
    reference: str | None,
    figure: "FigureKind",
    variant: str,
) -> list[Section]:
    """Return a section for each set of runs that may be compared: text before tasks,
    then sets with more runs first.
    """

    def text_first(group: pd.DataFrame) -> tuple[str, bool, int]:
        task = group["trained_task"].iloc[0] or ""
        return task, not group["newest"].any(), -group["folder"].nunique()

    sets = [group for _, group in frame.groupby("setting")]
    sets.sort(key=text_first)

    differing: dict[str, dict[str, str]] = {}
    for _, group in frame.groupby(frame["trained_task"].fillna("")):
        differing |= differing_settings(group)

    sections = []
    for number, group in enumerate(sets, start=1):
        task = group["trained_task"].iloc[0]
        heading = ""
        if task:
            heading = f"Task {task}"
        elif len(sets) > 1:
            heading = f"Set {number}"
        settings = differing.get(group["setting"].iloc[0], {})
        if settings:
            words = [f"{key} {value}" for key, value in settings.items()]
            heading += f": {', '.join(words)}"

        base = reference
        if reference not in {*group["label"], *group["encoding"]}:
            base = None
        if task:
            sections.append(Section.of_task(heading, group, base))
        else:
            section = Section.of_text(heading, group, base, least, figure, variant)
            sections.append(section)
    return sections
