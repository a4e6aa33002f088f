"""Evaluation on a task: how many answers are right, by the length of the problems, far beyond those trained on.

Two lengths are kept apart. Problems longer than any that was trained (`problem_length`) ask for more of the same; they
stand at more positions, too. Problems of a trained length whose positions are shifted (`offset`) ask for nothing but
positions that were not trained.

Answers are given at once, each token after the right ones before it. All of a problem's are right exactly if it would
also be solved token by token: a first error would be the same.
"""

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from posbench import machine
from posbench.config.schema import EvaluationConfig
from posbench.data import problems as data
from posbench.errors import Undefined
from posbench.evaluation import intervals, plan
from posbench.evaluation.evaluate import same
from posbench.evaluation.score import in_batches
from posbench.evaluation.subject import Answers, Solver
from posbench.evaluation.variants import AS_TRAINED, Variant, parse_choice
from posbench.processes import World
from posbench.run_folder.jsonl import plain
from posbench.run_folder.rows import BlockRow, EvaluationRow
from posbench.tasks.base import Problems, Task

VARIED = (1, 4)  # a task's own variants are tested at so many times the longest trained length


@dataclasses.dataclass(frozen=True)
class TaskEvaluation:
    """An evaluation on a task: the model, the problems and the settings. `evaluate.Evaluation` is that on text."""

    subject: Solver
    task: Task
    settings: EvaluationConfig
    checkpoint_step: int
    dtype: str  # what the subject runs in, for the rows: bf16, fp32
    device: torch.device  # whose memory is measured
    world: World = dataclasses.field(default_factory=World)  # the processes that share the forward passes


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


def evaluate(
    evaluation: TaskEvaluation, known: Sequence[EvaluationRow] = ()
) -> Iterator[tuple[EvaluationRow, list[BlockRow]]]:
    """The rows asked for that are not among the `known` ones, each with its problems as blocks, as they are computed.

    Raises:
        UserError: a mistyped extension; before anything is computed.
    """

    @functools.cache
    def problems_of(length: int, variant: str) -> Problems | Undefined:
        settings, task = evaluation.settings, _varied(evaluation.task, variant)
        try:
            return data.fixed(task, settings.split, length, settings.blocks, variant)
        except Undefined as error:
            return error

    asked = measurements(evaluation.settings, evaluation.task, evaluation.subject.train_length)
    planned = [(one, problems_of(one.length, one.of_task)) for one in asked]
    for measurement, problems, row in [(one, posed, _described(evaluation, one, posed)) for one, posed in planned]:
        if not any(same(row, other, evaluation.settings) for other in known):
            if row.status == "ok" and isinstance(problems, Problems):
                yield _measured(evaluation, measurement, row, problems)
            else:
                yield row, []


def _varied(task: Task, variant: str) -> Task:
    return task.varied(**parse_choice(f"{task.name}:{variant}")[1]) if variant else task


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


def _described(evaluation: TaskEvaluation, measurement: Measurement, problems: Problems | Undefined) -> EvaluationRow:
    """A row with all that is known before its forward passes. Its status says whether they are possible."""
    task, size = evaluation.task, evaluation.task.size(measurement.length)
    row = EvaluationRow(
        protocol="problems",
        length=size,
        length_ratio=measurement.length / task.longest,
        window=measurement.variant.window,
        extension=measurement.variant.name,
        task=":".join(part for part in (task.name, measurement.of_task) if part),
        problem_length=measurement.length,
        offset=measurement.offset,
        split=evaluation.settings.split,
        checkpoint_step=evaluation.checkpoint_step,
        status="ok",
        dtype=evaluation.dtype,
    )
    try:
        if isinstance(problems, Undefined):
            raise problems
        _, facts = _subject(evaluation, measurement, size)
    except Undefined as error:
        return dataclasses.replace(row, status="undefined", reason=str(error))
    return dataclasses.replace(row, extension_options=plain(facts), targets_sha256=data.sha256(problems))


def _measured(
    evaluation: TaskEvaluation, measurement: Measurement, row: EvaluationRow, problems: Problems
) -> tuple[EvaluationRow, list[BlockRow]]:
    started = time.monotonic()
    machine.reset_peak_memory(evaluation.device)
    subject, _ = _subject(evaluation, measurement, row.length)
    answers = _answers(subject, problems, evaluation)
    row, blocks = _with_numbers(row, problems, answers, measurement.variant)
    return dataclasses.replace(
        row,
        seconds=round(time.monotonic() - started, 3),
        peak_memory_bytes=machine.peak_memory(evaluation.device),
    ), blocks


def _answers(subject: Solver, problems: Problems, evaluation: TaskEvaluation) -> Answers:
    """All answers, so many problems at a time as the settings allow tokens."""
    count, size = problems.scored.shape

    def answered(some: slice) -> Answers:
        return subject.answers(problems.ids[some], problems.scored[some], some.start)

    return Answers.joined(in_batches(evaluation.world, count, size, evaluation.settings.batch_tokens, answered))


def _with_numbers(
    row: EvaluationRow, problems: Problems, answers: Answers, variant: Variant
) -> tuple[EvaluationRow, list[BlockRow]]:
    """The row with its numbers, and its problems."""
    nll, right = answers.nll, answers.correct
    if not_finite := int((~np.isfinite(nll)).sum()):
        reason = f"nll is not finite at {not_finite:,} of {nll.size:,} tokens"
        return dataclasses.replace(row, status="failed", reason=reason), []
    count = len(problems.ids)
    problem, at = np.nonzero(problems.scored)
    tokens = np.bincount(problem, minlength=count)
    sums, correct = np.bincount(problem, nll, count), np.bincount(problem, right, count)
    blocks = [
        BlockRow(block=number, nll_sum=float(total), n_tokens=int(scored), n_bytes=None, n_correct=int(known))
        for number, (total, scored, known) in enumerate(zip(sums, tokens, correct, strict=True))
    ]
    interval = intervals.over_text(intervals.blocks_of(blocks))
    row = dataclasses.replace(
        row,
        n_tokens=nll.size,
        n_blocks=count,
        mean_context=float(variant.visible(at + 1).mean()),
        nll=float(nll.mean()),
        accuracy=float(right.mean()),
        exact_match=float((correct == tokens).mean()),
        ci_low=None if interval is None else interval.low,
        ci_high=None if interval is None else interval.high,
        ci_over=None if interval is None else "problems",
    )
    return row, blocks
