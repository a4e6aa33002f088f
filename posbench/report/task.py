"""The report of a task: its part of the page, its table for a paper, its picture."""

from pathlib import Path

from posbench.report import captions, latex, task_figure, task_page, task_tables
from posbench.report.comparison.load import Group
from posbench.report.comparison.standing import Standing, standings
from posbench.report.page import Part, Section


def section(group: Group, heading: str, place: Path) -> Section:
    """Everything of one task; its pictures are written into a folder."""
    found = standings(group)
    shown, more = task_tables.main_tables(group, found), task_tables.more_tables(group, found)
    caption, notes = captions.of_task(group, found), captions.notes_on_task(group)
    said, data = task_tables.answer(found), task_page.curves(group, found)
    part = Part(heading, said, caption, [*shown, *more], notes, data, on_task=True)
    behind = " ".join([caption, *notes])
    return Section(part, len(shown), _latex(group, found, behind), task_figure.save(group, found, place), "Accuracy")


def _latex(group: Group, found: list[Standing], behind: str) -> str:
    title = f"{group.runs[0].config.study} {group.task}"
    return latex.of_table(task_tables.for_paper(found), task_tables.caption_for_paper(group, found), title, behind)
