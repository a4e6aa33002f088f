"""The answers of one run by problem length, drawn in the terminal with their numbers."""

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console, RenderableType
from rich.table import Table

from posbench.config.built import task_of
from posbench.config.external import AnyConfig
from posbench.evaluation.answers import GATE, Answer, Answers
from posbench.run_folder.rows import EvaluationRow
from posbench.terminal import chart, console, tables

FLAT = 10.0  # percent: curves that span less look flat
_SPARE = ("nll", "by chance")  # columns, the least important first


def title_of(config: AnyConfig) -> str:
    """A title: the encoding and its task."""
    task = task_of(config.data)
    trained = f"{config.data.name}, trained at lengths {task.shortest} to {task.longest}"
    return f"{config.encoding.name}, seed {config.seed}: {trained}"


def pieces(folder: Path, config: AnyConfig, rows: list[EvaluationRow], out: Console) -> Iterator[RenderableType]:
    """What is printed of a run on a task: the share of right answers by problem length, and the other tests.

    Args:
        rows: of one split and one checkpoint.
    """
    plain, answers = not console.carries_unicode(out), Answers.of(folder, config, rows)
    own = [answer for place, answer in answers.at.items() if place.as_trained]
    yield _table(own, title_of(config), out)
    yield _learned(answers)
    drawn = [
        chart.Series("tokens right", _points(own, "accuracy"), "o" if plain else "●", "bright_blue"),
        chart.Series("whole answers", _points(own, "exact_match"), "x" if plain else "◇", "bright_black"),
    ]
    if len(drawn[0].points) > 1:
        yield chart.draw(drawn, ("length of the problems", "percent"), out.width, FLAT, plain)
    shown = {id(answer.row) for answer in own}
    if others := [row for row in rows if row.protocol == Answers.protocol and id(row) not in shown]:
        yield _others_table(others, out)


def _learned(answers: Answers) -> str:
    """A line on whether the run learned its task; if not, longer problems show nothing."""
    if answers.learned is None:
        return "Not tested at the longest trained length."
    if answers.learned == "no":
        return f"Not learned: that is {GATE:.0%} of the tokens at every trained length."
    when = answers.steps_to_gate
    return f"Learned: {GATE:.0%} of the tokens or more at every trained length" + (
        f", in validation first after step {when:,}." if when is not None else "."
    )


def _points(answers: list[Answer], column: str) -> dict[int, float]:
    found = {answer.row.problem_length: getattr(answer, column) for answer in answers}
    return {length: 100 * share for length, share in found.items() if length is not None and share is not None}


def _table(answers: list[Answer], title: str, out: Console) -> Table:
    """One line per length. Rows of earlier versions do not know the trivial reader."""
    floors = ["trivial reader", "by chance"] if any(answer.trivial is not None for answer in answers) else []
    names = ["length", "tokens right", *floors, "whole answers", "nll"]
    lines = [
        [
            _length(answer.row),
            _percent(answer.row, answer.accuracy),
            *("" if share is None else f"{share:.1%}" for share in (answer.trivial, answer.chance)[: len(floors)]),
            _percent(answer.row, answer.exact_match) if answer.row.status == "ok" else "",
            "" if answer.row.nll is None else f"{answer.row.nll:.3f}",
        ]
        for answer in answers
    ]
    caption = "percent, each token after the right ones before it"
    return tables.fitted(out, names, lines, [names.index(name) for name in _SPARE if name in names], title, caption)


def _others_table(rows: list[EvaluationRow], out: Console) -> Table:
    """Shifted positions, variants of the task and changed models: one line per name, as many lengths as fit."""
    by_name: dict[str, dict[str, EvaluationRow]] = {}
    for row in rows:
        by_name.setdefault(row.curve_name.removeprefix("problems_"), {})[_length(row)] = row
    ordered = sorted(rows, key=lambda row: row.problem_length or 0)
    heads = ["tokens right by length", *dict.fromkeys(_length(row) for row in ordered)]
    lines = [
        [name, *(_percent(found[at], found[at].accuracy) if at in found else "" for at in heads[1:])]
        for name, found in by_name.items()
    ]
    return tables.fitted(out, heads, lines, [*range(2, len(heads)), 1])


def _length(row: EvaluationRow) -> str:
    return f"{row.problem_length} ({row.length_ratio:.3g}x)"


def _percent(row: EvaluationRow, share: float | None) -> str:
    if row.status != "ok":
        return row.status
    return "" if share is None else f"{share:.1%}"
