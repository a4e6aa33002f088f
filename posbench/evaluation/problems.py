"""Problems: those of a task that a model was trained on, and those that a probe poses
in windows of a text.

All tokens of an answer are predicted in one pass, each after the right tokens before
it. All of them are right exactly if the model would also give the right answer token by
token, since its first error would be the same.

Two tests of a task are kept apart. Problems longer than any trained one
(`problem_length`) ask for more of the same and also stand at more positions. Problems
of a trained length at shifted positions (`offset`) ask for untrained positions and
nothing else.

A probe's answer is one token. It is right if it is likelier than each other candidate,
so a model to which all candidates are equally likely gets none right. It is an exact
match if it is the likeliest token of the vocabulary.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from posbench.config.schema import EvaluationConfig
from posbench.data import batches as data
from posbench.data.tokens import TokenSplit
from posbench.errors import Undefined
from posbench.evaluation import models, plan
from posbench.evaluation.models import AS_TRAINED, Bools, Floats, Subject, Variant
from posbench.evaluation.plan import AnyEvaluation, Planned
from posbench.evaluation.probes import Choice, Encode, Ids, Material
from posbench.results.estimate import estimate
from posbench.run.rows import EvaluationRow, plain
from posbench.tasks.base import Problems, Task

# multiples of the longest trained length at which variants of a task are tested
VARIED = (1, 4)
# length of problems, variants of the model and of the task, first position
TaskPoint = tuple[int, Variant, str, int]
_TEXT = 2**16  # at most so many tokens of the text are material for a probe's problems


def _predicted(
    subject: Subject,
    evaluation: AnyEvaluation,
    ids: Ids,
    scored: Bools,
    candidates: Ids,
    unit: str = "tokens",
) -> models.Predicted:
    """Return the predictions in problems (B, C + 1), made in batches. Other arguments
    are as in `models.predicted`.
    """
    n_scored = np.concatenate([[0], scored.sum(axis=1).cumsum()])

    def predict(batch: slice) -> models.Predicted:
        start, end, _ = batch.indices(len(ids))
        return models.predicted(
            subject,
            ids[batch],
            scored[batch],
            start,
            candidates[n_scored[start] : n_scored[end]],
        )

    parts = models.in_batches(
        evaluation.world,
        len(ids),
        ids.shape[1] - 1,
        evaluation.settings.batch_tokens,
        predict,
    )
    predictions = models.Predicted(
        *(np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    )
    models.check_finite(predictions.nll, unit)
    return predictions


def _with_answers(
    row: EvaluationRow, nll: Floats, correct: Bools, problem: Ids
) -> EvaluationRow:
    """Return the row with the numbers of its answers, from the nats, the correctness
    and the problem of each token.
    """
    tokens, sums = np.bincount(problem), np.bincount(problem, nll)
    means: dict[str, Any] = {
        "nll": float(nll.mean()),
        "accuracy": float(correct.mean()),
    }
    row = dataclasses.replace(row, n_tokens=len(problem), n_blocks=len(tokens), **means)
    # too repetitive for an interval
    if len(tokens) < 2 or 2 * (row.n_distinct or len(tokens)) < len(tokens):
        return row
    interval = estimate(sums[None], tokens)
    return dataclasses.replace(
        row, ci_low=interval.low(), ci_high=interval.high(), ci_over="problems"
    )


def choices_of(
    measurement: plan.Measurement, split: TokenSplit, encode: Encode | None
) -> list[Choice]:
    """Return the problems of a row, one in each window.

    Raises Undefined if the model's tokenizer or the text has no such problems, or they
    do not fit into the window.
    """
    windows = measurement.windows
    assert measurement.poses is not None and windows is not None
    text = np.asarray(split.ids[:_TEXT], dtype=np.int64)
    pose = measurement.poses(Material(text[text != split.ids[split.starts[0]]], encode))
    passages = (
        np.asarray(split.ids[start : start + windows.length], dtype=np.int64)
        for start in windows.starts
    )
    return [pose(window, number) for number, window in enumerate(passages)]


def sha256(choices: list[Choice]) -> str:
    """Return the digest of problems; rows that share it are paired. Candidates cover
    the last token of each problem.
    """
    digest = hashlib.sha256()
    for part in (
        [c.ids[:-1] for c in choices],
        [c.candidates for c in choices],
        [c.right for c in choices],
    ):
        digest.update(np.array(part, dtype=np.int64).tobytes())
    return digest.hexdigest()


def ranked(
    row: EvaluationRow,
    subject: Subject,
    choices: list[Choice],
    evaluation: AnyEvaluation,
) -> EvaluationRow:
    """Return the row with its numbers: the model ranks the candidates of each problem."""
    ids, candidates = (
        np.stack([c.ids for c in choices]),
        np.stack([c.candidates for c in choices]),
    )
    right, number = np.array([c.right for c in choices]), np.arange(len(ids))
    scored = np.zeros((len(ids), ids.shape[1] - 1), np.bool_)
    scored[:, -1] = True
    nll, likeliest = _predicted(
        subject, evaluation, ids, scored, candidates, "candidates"
    )
    others, trivial = (
        nll.copy(),
        [c.trivial == c.right for c in choices if c.trivial is not None],
    )
    others[number, right] = np.inf
    row = dataclasses.replace(
        row,
        mean_context=float(row.length),
        chance=1 / nll.shape[1],
        trivial=float(np.mean(trivial)) if trivial else None,
        exact_match=float((likeliest == ids[:, -1]).mean()),
    )
    return _with_answers(
        row, nll[number, right], nll[number, right] < others.min(axis=1), number
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskEvaluation(AnyEvaluation):
    """An evaluation on a task."""

    subject: Subject
    task: Task

    def planned(self) -> list[Planned]:
        problems_of = functools.cache(
            functools.partial(_test_problems, self.task, self.settings)
        )
        points = measurements(self.settings, self.task, self.subject.train_length)
        return [_planned(self, point, problems_of) for point in points]


def _test_problems(
    task: Task, settings: EvaluationConfig, length: int, variant: str
) -> Problems:
    """Return the test problems of a length and a variant of the task; raises Undefined
    if there are none.
    """
    task = (
        task.varied(**models.parse_choice(f"{task.name}:{variant}")[1])
        if variant
        else task
    )
    return data.fixed_problems(task, settings.split, length, settings.blocks, variant)


def measurements(
    settings: EvaluationConfig, task: Task, train_length: int
) -> list[TaskPoint]:
    """Return all requested rows: plain, narrowed and extended models, shifted
    positions, and variants of the task.

    `train_length`: in tokens; beyond it a narrowed model differs from the plain one.
    """
    longest = task.longest
    further = [max(task.shortest, round(ratio * longest)) for ratio in settings.ratios]
    lengths = sorted({task.shortest, (task.shortest + longest) // 2, longest, *further})
    # windows and extensions depend on tokens
    of_size = {task.size(length): length for length in lengths}
    variants = plan.varied(settings, list(of_size), train_length)
    rows = [(of_size[size], variant, "", 0) for variant, size in variants]
    rows = [row for row in rows if row[1].extension is None or row[0] >= longest]
    rows += [(longest, AS_TRAINED, "", offset) for offset in settings.offsets]
    varied = [
        (variant, ratio)
        for variant in task.variants
        for ratio in VARIED
        if ratio in settings.ratios
    ]
    return rows + [
        (round(ratio * longest), AS_TRAINED, variant, 0) for variant, ratio in varied
    ]


def _planned(
    evaluation: TaskEvaluation,
    point: TaskPoint,
    problems_of: Callable[[int, str], Problems],
) -> Planned:
    """Return a row with all that is known before its forward passes, and the function
    that fills in its numbers.
    """
    task, (length, variant, of_task, offset) = evaluation.task, point
    row = evaluation.row(
        protocol="problems",
        length=task.size(length),
        length_ratio=length / task.longest,
        window=variant.window,
        extension=variant.name,
        task=f"{task.name}:{of_task}" if of_task else task.name,
        problem_length=length,
        offset=offset,
    )
    try:
        problems = problems_of(length, of_task)
        # An extension covers at least the training length.
        subject, facts = evaluation.subject.varied(
            variant, max(row.length + offset, evaluation.subject.train_length)
        )
        subject = subject.shifted(offset) if offset else subject
    except Undefined as error:
        return (
            dataclasses.replace(row, status="undefined", reason=str(error)),
            lambda row: row,
        )
    labels, right = problems.ids[:, 1:], task.trivial(problems) == problems.ids[:, 1:]
    row = dataclasses.replace(
        row,
        n_distinct=len(np.unique(problems.ids, axis=0)),
        chance=1 / len(np.unique(labels[problems.scored])),
        trivial=float(right[problems.scored].mean()),
        extension_options=plain(facts),
        targets_sha256=data.problems_sha256(problems),
    )

    def solved(row: EvaluationRow) -> EvaluationRow:
        answers, (problem, position) = (
            labels[problems.scored],
            np.nonzero(problems.scored),
        )
        nll, likeliest = _predicted(
            subject, evaluation, problems.ids, problems.scored, answers[:, None]
        )
        correct = likeliest == answers
        return dataclasses.replace(
            _with_answers(row, nll[:, 0], correct, problem),
            mean_context=float(variant.visible(position + 1).mean()),
            exact_match=float((np.bincount(problem, ~correct) == 0).mean()),
        )

    return row, solved
