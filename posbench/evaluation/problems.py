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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from posbench import machine
from posbench.config.overrides import parse_choice
from posbench.config.schema import EvaluationConfig
from posbench.data import batches as data
from posbench.data.tokens import TokenSplit
from posbench.errors import Undefined
from posbench.estimate import estimate
from posbench.evaluation import requests, subjects
from posbench.evaluation.probes import Choice, Encode, Ids, Material
from posbench.evaluation.requests import AnyEvaluation, Requested
from posbench.evaluation.subjects import (
    AS_TRAINED,
    Bools,
    Floats,
    Subject,
    Variant,
)
from posbench.run.rows import EvaluationRow, json_plain
from posbench.tasks.base import Problems, Task

# multiples of the longest trained length at which variants of a task are tested
VARIATION_RATIOS = (1, 4)
_TEXT = 2**16  # at most so many tokens of the text are material for a probe's problems


class TaskPoint(NamedTuple):
    """What a row of a task is about."""

    length: int  # of problems
    variant: Variant = AS_TRAINED  # of the model
    of_task: str = ""  # the variant of the task
    offset: int = 0  # the first position

    def columns(self, task: Task) -> dict[str, Any]:
        """Return what its row has in columns that need no problems."""
        return {
            "protocol": "problems",
            "length": task.size(self.length),
            "length_ratio": self.length / task.longest,
            "window": self.variant.window,
            "extension": self.variant.name,
            "task": f"{task.name}:{self.of_task}" if self.of_task else task.name,
            "problem_length": self.length,
            "offset": self.offset,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskEvaluation(AnyEvaluation):
    """An evaluation on a task."""

    subject: Subject
    task: Task

    def requested(self, existing: Sequence[EvaluationRow] = ()) -> list[Requested]:
        settings = self.settings

        @functools.cache
        def problems_of(length: int, of_task: str) -> Problems:
            """Return the test problems of a length and a variant of the task; raises
            Undefined if there are none.
            """
            task = self.task
            if of_task:
                _, options = parse_choice(f"{task.name}:{of_task}")
                task = task.with_options(**options)
            return data.fixed_problems(
                task, settings.split, length, settings.blocks, of_task
            )

        points = measurements(settings, self.task, self.subject.train_length)
        return [_requested(self, point, problems_of) for point in points]


def measurements(
    settings: EvaluationConfig, task: Task, train_length: int
) -> list[TaskPoint]:
    """Return all requested rows: plain, narrowed and extended models, shifted
    positions, and variants of the task.

    `train_length`: in tokens; beyond it a narrowed model differs from the plain one.
    """
    longest = task.longest
    lengths = {task.shortest, (task.shortest + longest) // 2, longest}
    for ratio in settings.ratios:
        lengths.add(max(task.shortest, round(ratio * longest)))
    # windows and extensions depend on tokens
    length_of = {task.size(length): length for length in sorted(lengths)}

    points = []
    for variant, size in requests.variants_at(settings, list(length_of), train_length):
        if variant.extension is None or length_of[size] >= longest:
            points.append(TaskPoint(length_of[size], variant))
    points += [TaskPoint(longest, offset=offset) for offset in settings.offsets]
    tested = [ratio * longest for ratio in VARIATION_RATIOS if ratio in settings.ratios]
    for of_task in task.variations:
        points += [TaskPoint(length, of_task=of_task) for length in tested]
    return points


def _requested(
    evaluation: TaskEvaluation,
    point: TaskPoint,
    problems_of: Callable[[int, str], Problems],
) -> Requested:
    """Return the row of a point before its forward passes, and the function that makes
    them. `problems_of` makes the test problems of a length and a variant of the task.
    """
    task = evaluation.task
    row = evaluation.row(**point.columns(task))

    # An extension covers at least the training length.
    furthest = max(row.length + point.offset, evaluation.subject.train_length)
    try:
        problems = problems_of(point.length, point.of_task)
        subject, facts = evaluation.subject.in_variant(point.variant, furthest)
        if point.offset:
            subject = subject.shifted(point.offset)
    except Undefined as error:
        return dataclasses.replace(row, status="undefined", reason=str(error)), None

    labels = problems.ids[:, 1:]  # (problems, C)
    answers = labels[problems.scored]  # (n,)
    guesses = task.trivial(problems)[problems.scored]
    row = dataclasses.replace(
        row,
        n_distinct=len(np.unique(problems.ids, axis=0)),
        chance=1 / len(np.unique(answers)),
        trivial=float((guesses == answers).mean()),
        extension_options=json_plain(facts),
        targets_sha256=data.problems_sha256(problems),
    )

    def measure() -> EvaluationRow:
        scored = problems.scored
        nll, likeliest = _predicted(
            subject, evaluation, problems.ids, scored, answers[:, None]
        )
        correct = likeliest == answers
        number, place = np.nonzero(scored)
        n_wrong = np.bincount(number, ~correct)  # of each problem
        return dataclasses.replace(
            _with_answers(row, nll[:, 0], correct, number),
            mean_context=float(point.variant.visible(place + 1).mean()),
            exact_match=float((n_wrong == 0).mean()),
        )

    return row, measure


def choices_of(
    measurement: requests.Measurement, split: TokenSplit, encode: Encode
) -> list[Choice]:
    """Return the problems of a row, one in each window.

    Raises Undefined if the model's tokenizer or the text has no such problems, or they
    do not fit into the window.
    """
    windows = measurement.windows
    assert measurement.pose_from is not None and windows is not None
    text = np.asarray(split.ids[:_TEXT], dtype=np.int64)
    separator = split.ids[split.starts[0]]
    pose = measurement.pose_from(Material(text[text != separator], encode))

    choices = []
    for number, start in enumerate(windows.starts):
        window = np.asarray(split.ids[start : start + windows.length], dtype=np.int64)
        choices.append(pose(window, number))
    return choices


def choices_sha256(choices: list[Choice]) -> str:
    """Return the digest of problems; rows that share it are paired. Candidates cover
    the last token of each problem.
    """
    read = [choice.ids[:-1] for choice in choices]
    candidates = [choice.candidates for choice in choices]
    right = [choice.right for choice in choices]
    digest = hashlib.sha256()
    for part in (read, candidates, right):
        digest.update(np.array(part, dtype=np.int64).tobytes())
    return digest.hexdigest()


def ranked(
    row: EvaluationRow,
    subject: Subject,
    choices: list[Choice],
    evaluation: AnyEvaluation,
) -> EvaluationRow:
    """Return the row with its numbers: the model ranks the candidates of each
    problem.
    """
    ids = np.stack([choice.ids for choice in choices])  # (n, C + 1)
    candidates = np.stack([choice.candidates for choice in choices])  # (n, K)
    right = np.array([choice.right for choice in choices])
    trivial = [
        choice.trivial == choice.right
        for choice in choices
        if choice.trivial is not None
    ]

    problems = Problems.ending(ids, 1)
    nll, likeliest = _predicted(subject, evaluation, ids, problems.scored, candidates)
    number = np.arange(len(ids))
    nll_of_right = nll[number, right]
    others = nll.copy()
    others[number, right] = np.inf

    trivial_share = None
    if trivial:
        trivial_share = float(np.mean(trivial))
    row = dataclasses.replace(
        row,
        mean_context=float(row.length),
        chance=1 / nll.shape[1],
        trivial=trivial_share,
        exact_match=float((likeliest == ids[:, -1]).mean()),
    )
    correct = nll_of_right < others.min(axis=1)
    return _with_answers(row, nll_of_right, correct, number)


def _predicted(
    subject: Subject,
    evaluation: AnyEvaluation,
    ids: Ids,
    scored: Bools,
    candidates: Ids,
) -> tuple[Floats, Ids]:
    """Return the nats (n, K) of each candidate and the likeliest token (n,) at each
    scored place of problems (B, C + 1), made in batches. Other arguments are as in
    `subjects.predicted`.
    """
    n_scored = np.concatenate([[0], scored.sum(axis=1).cumsum()])

    def predict(batches: Sequence[slice]) -> list[tuple[Floats, Ids]]:
        nll = []
        likeliest = []
        for batch in batches:
            start, end, _ = batch.indices(len(ids))
            of_batch = candidates[n_scored[start] : n_scored[end]]
            nats, tokens = subjects.predicted(
                subject, ids[batch], scored[batch], start, of_batch
            )
            nll.append(nats)
            likeliest.append(tokens)
        on_host = [tokens.numpy() for tokens in machine.to_host(likeliest)]
        return list(zip(subjects.on_host(nll), on_host, strict=True))

    parts = subjects.in_batches(
        evaluation.world,
        len(ids),
        ids.shape[1] - 1,
        evaluation.settings.batch_tokens,
        predict,
    )
    nll, likeliest = (np.concatenate(column) for column in zip(*parts, strict=True))
    subjects.check_finite(nll)
    return nll, likeliest


def _with_answers(
    row: EvaluationRow, nll: Floats, correct: Bools, problem: Ids
) -> EvaluationRow:
    """Return the row with the numbers of its answers, from the nats, the correctness
    and the problem of each token.
    """
    tokens = np.bincount(problem)
    n_problems = len(tokens)
    row = dataclasses.replace(
        row,
        n_tokens=len(problem),
        n_blocks=n_problems,
        nll=float(nll.mean()),
        accuracy=float(correct.mean()),
    )
    n_distinct = row.n_distinct or n_problems
    if n_problems < 2 or 2 * n_distinct < n_problems:  # too repetitive for an interval
        return row

    interval = estimate(np.bincount(problem, nll)[None], tokens)
    return dataclasses.replace(
        row, ci_low=interval.low(), ci_high=interval.high(), ci_over="problems"
    )
