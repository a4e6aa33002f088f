"""Evaluation on a task: how many answers are right, by the length of the problems, far beyond those trained on.

Two lengths are kept apart. Problems longer than any that was trained (`problem_length`) ask for more of the same; they
stand at more positions, too. Problems of a trained length whose positions are shifted (`offset`) ask for nothing but
positions that were not trained.

Answers are given at once, each token after the right ones before it. All of a problem's are right exactly if it would
also be solved token by token: a first error would be the same.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from posbench.config.schema import EvaluationConfig
from posbench.data import problems as data
from posbench.errors import Undefined
from posbench.evaluation import choices, plan
from posbench.evaluation.evaluate import AnyEvaluation, Planned
from posbench.evaluation.score import check_finite, in_batches
from posbench.evaluation.subject import Answers, Solver
from posbench.evaluation.variants import AS_TRAINED, Variant, parse_choice
from posbench.run_folder.jsonl import plain
from posbench.run_folder.rows import EvaluationRow
from posbench.tasks.base import Problems, Task

Posed = Callable[[int, str], Problems]  # problems of a length and a variant of the task
VARIED = (1, 4)  # a task's own variants are tested at so many times the longest trained length


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskEvaluation(AnyEvaluation):
    """An evaluation on a task."""

    subject: Solver
    task: Task

    def planned(self) -> list[Planned]:
        @functools.cache
        def posed(length: int, variant: str) -> Problems:
            settings, task = self.settings, self.task
            task = task.varied(**parse_choice(f"{task.name}:{variant}")[1]) if variant else task
            return data.fixed(task, settings.split, length, settings.blocks, variant)

        asked = measurements(self.settings, self.task, self.subject.train_length)
        return [(_described(self, one, posed), functools.partial(_measured, self, one, posed)) for one in asked]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One row of an evaluation."""

    length: int  # of the problems
    variant: Variant = AS_TRAINED  # of the model
    of_task: str = ""  # what is varied of the task, such as depth=0.5
    offset: int = 0  # position of the first token


def measurements(settings: EvaluationConfig, task: Task, train_length: int) -> list[Measurement]:
    """All rows that the settings ask for: plain, narrowed or extended models, shifted positions, the task's variants.

    Args:
        train_length: in tokens; beyond it a narrowed model differs from the plain one.
    """
    longest = task.longest
    further = [round(ratio * longest) for ratio in settings.ratios]
    lengths = sorted({task.shortest, (task.shortest + longest) // 2, longest, *further})
    of_size = {task.size(length): length for length in lengths}  # what narrows or extends goes by tokens
    rows = [
        Measurement(of_size[size], variant)
        for variant, size in plan.varied(settings, list(of_size), train_length)
        if variant.extension is None or of_size[size] >= longest
    ]
    rows += [Measurement(longest, offset=offset) for offset in settings.offsets]
    return rows + [
        Measurement(round(ratio * longest), of_task=variant)
        for variant in task.variants
        for ratio in VARIED
        if ratio in settings.ratios
    ]


def _subject(evaluation: TaskEvaluation, measurement: Measurement, size: int) -> tuple[Solver, dict[str, Any] | None]:
    """The variant of the model that a row asks for, and its options.

    Raises:
        Undefined: it does not exist there.
    """
    # An extension reaches no less far than training did.
    reach = max(size + measurement.offset, evaluation.subject.train_length)
    varied = evaluation.subject.varied(measurement.variant, reach)
    assert isinstance(varied.subject, Solver)
    return (varied.subject.shifted(measurement.offset) if measurement.offset else varied.subject), varied.facts


def _described(evaluation: TaskEvaluation, measurement: Measurement, posed: Posed) -> EvaluationRow:
    """A row with all that is known before its forward passes. Its status says whether they are possible."""
    task, size = evaluation.task, evaluation.task.size(measurement.length)
    row = evaluation.row(
        protocol="problems",
        length=size,
        length_ratio=measurement.length / task.longest,
        window=measurement.variant.window,
        extension=measurement.variant.name,
        task=":".join(part for part in (task.name, measurement.of_task) if part),
        problem_length=measurement.length,
        offset=measurement.offset,
    )
    try:
        problems = posed(measurement.length, measurement.of_task)
        _, facts = _subject(evaluation, measurement, size)
    except Undefined as error:
        return dataclasses.replace(row, status="undefined", reason=str(error))
    labels, right = problems.ids[:, 1:], task.trivial(problems) == problems.ids[:, 1:]
    return dataclasses.replace(
        row,
        n_distinct=len(np.unique(problems.ids, axis=0)),
        chance=1 / len(np.unique(labels[problems.scored])),
        trivial=float(right[problems.scored].mean()),
        extension_options=plain(facts),
        targets_sha256=data.sha256(problems),
    )


def _measured(evaluation: TaskEvaluation, measurement: Measurement, posed: Posed, row: EvaluationRow) -> EvaluationRow:
    problems = posed(measurement.length, measurement.of_task)
    subject, _ = _subject(evaluation, measurement, row.length)
    answers = _answers(subject, problems, evaluation)
    check_finite(answers.nll)
    problem, at = np.nonzero(problems.scored)
    wrong = np.bincount(problem, ~answers.correct)
    row = choices.answered(row, answers, problem)
    if row.is_repetitive:
        row = dataclasses.replace(row, ci_low=None, ci_high=None, ci_over=None)
    return dataclasses.replace(
        row,
        mean_context=float(measurement.variant.visible(at + 1).mean()),
        exact_match=float((wrong == 0).mean()),
    )


def _answers(subject: Solver, problems: Problems, evaluation: TaskEvaluation) -> Answers:
    """All answers, so many problems at a time as the settings allow tokens."""
    count, size = problems.scored.shape

    def answered(some: slice) -> Answers:
        return subject.answers(problems.ids[some], problems.scored[some], some.start)

    return Answers.joined(in_batches(evaluation.world, count, size, evaluation.settings.batch_tokens, answered))
