"""The report of a task: its part of the page with a chart, its table for a paper, its picture."""

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from posbench.report import captions, chart, families, latex, page, styles, task_figure, task_tables
from posbench.report.chart import Axes, Dot, Series
from posbench.report.comparison.load import Group
from posbench.report.comparison.standing import Standing, learned, standings
from posbench.report.page import Section
from posbench.report.styles import Style
from posbench.report.task_figure import PANELS, lengths, medians_of, seeds


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
        chart=curves(group, found),
        latex=latex.of_table(table, said_of_it, title, " ".join([caption, *notes])),
        pictures=task_figure.save(group, found, place),
        pictured="Accuracy",
        on_task=True,
    )


def curves(group: Group, found: Sequence[Standing]) -> Markup:
    """The chart for the page, medians of all seeds and every seed a dot, as JSON for a script element."""
    looks = styles.assign((scheme.name, scheme.label) for scheme in group.schemes)
    known = lengths(found)
    shown = [one for _, members in families.rows(found) for one in members]
    series = [_series(one, looks[one.scheme.label], known) for one in shown]
    axes = Axes(PANELS, "right, %", "problem length (log scale)", "longest trained", 100.0)
    return page.as_script_data(chart.spec(series, axes))


def _series(one: Standing, look: Style, known: dict[float, int | None]) -> Series:
    label = one.scheme.label if one.ranked else f"{one.scheme.label}, not learned"
    dots: dict[str, list[Dot]] = {column: [] for column in PANELS}
    for column in PANELS:
        by_run, medians = seeds(one, column), medians_of(one, column)
        for ratio, length in known.items():
            values = [(shares[ratio], bool(learned(run))) for run, shares in by_run if ratio in shares]
            if one.ranked and ratio in medians:
                dots[column].append(Dot(ratio, length, medians[ratio]))
            dots[column] += [
                Dot(ratio, length, share, None, seed, taught, is_joined=False)
                for seed, (share, taught) in enumerate(values)
            ]
    return Series(label, Style(look.colour, look.mark, ""), dots, undefined_at=one.undefined_at)
