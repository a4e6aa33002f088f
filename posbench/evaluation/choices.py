"""Probes that pose a problem in each window: how often is the right answer the likeliest of its candidates?

The answer is the token after the window, so a problem costs one forward pass, whatever the number of candidates. What
is likelier than nothing else is not right: a model to which all candidates are alike gets none. The share of right
answers has an interval over problems (Clopper & Pearson), for the checkpoint it was measured on.
"""

import dataclasses
import hashlib

import numpy as np

from posbench.data.tokens import TokenSplit
from posbench.evaluation import intervals
from posbench.evaluation.plan import Forward
from posbench.evaluation.probes import Choice, Encode, Ids, Material
from posbench.evaluation.score import check_finite, in_batches
from posbench.evaluation.subject import Answers, Floats, Ranker, Subject
from posbench.processes import World
from posbench.run_folder.rows import BlockRow, EvaluationRow, Measured

_TEXT = 2**16  # tokens of the text that problems are made of, at most


@dataclasses.dataclass(frozen=True, eq=False)
class Problems:
    """The problems of a row."""

    ids: Ids  # (n, C)
    candidates: Ids  # (n, K)
    right: Ids  # (n,) into candidates

    @property
    def sha256(self) -> str:
        """Identity of the problems; rows that share it are paired."""
        digest = hashlib.sha256()
        for part in (self.ids, self.candidates, self.right):
            digest.update(np.ascontiguousarray(part, dtype=np.int64).tobytes())
        return digest.hexdigest()


def problems_of(forward: Forward, split: TokenSplit, encode: Encode | None) -> Problems:
    """The problems of a forward pass, one in each window.

    Raises:
        Undefined: the model's tokenizer or the text has no such problems, or they do not fit into the window.
    """
    assert forward.poses is not None
    (windows,) = forward.windows
    text = np.asarray(split.ids[:_TEXT], dtype=np.int64)
    posed = forward.poses(Material(text[text != split.ids[split.starts[0]]], encode))
    choices: list[Choice] = []
    for number, start in enumerate(windows.starts):
        choices.append(posed(np.asarray(split.ids[start : start + windows.length], dtype=np.int64), number))
    return Problems(
        np.stack([choice.ids for choice in choices]),
        np.stack([choice.candidates for choice in choices]),
        np.array([choice.right for choice in choices]),
    )


def nll_of(subject: Subject, problems: Problems, batch_tokens: int, world: World) -> Floats:
    """Negative log-likelihoods in nats (n, K) of all candidates.

    Args:
        batch_tokens: tokens per forward pass, at least one problem.
        world: the processes that share the forward passes; all return the whole result.
    """
    assert isinstance(subject, Ranker)
    count, length = problems.ids.shape

    def ranked(some: slice) -> Floats:
        return subject.nll_of_candidates(problems.ids[some], problems.candidates[some], some.start)

    return np.concatenate(in_batches(world, count, length, batch_tokens, ranked))


def with_numbers(row: EvaluationRow, problems: Problems, nll: Floats) -> Measured:
    """The row with its numbers, and its problems as blocks."""
    check_finite(nll, "candidates")
    number = np.arange(len(nll))
    of_right = nll[number, problems.right]
    others = nll.copy()
    others[number, problems.right] = np.inf
    row = dataclasses.replace(row, mean_context=float(row.length), chance=1 / nll.shape[1])
    return answered(row, Answers(of_right, of_right < others.min(axis=1)), number)


def answered(row: EvaluationRow, answers: Answers, problem: Ids) -> Measured:
    """The row with the numbers of its answers, and its problems as blocks.

    Args:
        problem: (n,) the number of the problem that each of the n answered tokens belongs to.
    """
    tokens, sums, correct = (np.bincount(problem, weights) for weights in (None, answers.nll, answers.correct))
    blocks = [
        BlockRow(block=block, nll_sum=float(total), n_tokens=int(scored), n_bytes=None, n_correct=int(right))
        for block, (total, scored, right) in enumerate(zip(sums, tokens, correct, strict=True))
    ]
    interval = intervals.over_text(intervals.blocks_of(blocks))
    row = dataclasses.replace(
        row,
        n_tokens=len(problem),
        n_blocks=len(blocks),
        nll=float(answers.nll.mean()),
        accuracy=float(answers.correct.mean()),
        ci_low=None if interval is None else interval.low,
        ci_high=None if interval is None else interval.high,
        ci_over=None if interval is None else "problems",
    )
    return row, blocks


def interval_of(row: EvaluationRow) -> tuple[float, float] | None:
    """The 95 % interval of a row's share of right answers, over problems; None if the row has no share."""
    if row.accuracy is None or row.n_blocks is None or not 0 <= row.accuracy <= 1 or row.n_blocks < 1:
        return None
    return intervals.clopper_pearson(round(row.accuracy * row.n_blocks), row.n_blocks)
