"""The report of a task: its part of the page, its table for a paper, its picture."""

from pathlib import Path

from posbench.report import captions, latex, task_figure, task_tables
from posbench.report.comparison.load import Group
from posbench.report.comparison.standing import standings
from posbench.report.page import Section


def section(group: Group, heading: str, place: Path) -> Section:
    """Everything of one task; its pictures are written into a folder."""
    found = standings(group)
    caption, notes = captions.of_task(group, found), captions.notes_on_task(group)
    title = f"{group.runs[0].config.study} {group.task}"
    table, said_of_it = task_tables.for_paper(found), task_tables.caption_for_paper(group, found)
    return Section(
        heading=heading,
        answer=task_tables.answer(found),
        caption=caption,
        shown=task_tables.main_tables(group, found),
        more=task_tables.more_tables(found),
        notes=notes,
        latex=latex.of_table(table, said_of_it, title, " ".join([caption, *notes])),
        pictures=task_figure.save(group, found, place),
        pictured="Accuracy",
        on_task=True,
    )
