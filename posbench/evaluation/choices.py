"""Probes that pose a problem in each window: how often does the model know the answer?

An answer is one or more tokens, and all are predicted in one forward pass, each after the right ones before it. Where
there is a choice, the answer is right if its token is likelier than that of each other candidate: what is likelier than
nothing else is not right, so a model to which all candidates are alike gets none. The whole answer is matched exactly
if each of its tokens is the likeliest of the vocabulary: just then greedy decoding says it. Shares have intervals over
problems (Clopper & Pearson), for the checkpoint they were measured on.
"""

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from posbench.data.tokens import TokenSplit
from posbench.evaluation.plan import Forward
from posbench.evaluation.probes import Choice, Encode, Ids, Material
from posbench.evaluation.score import check_finite, in_batches
from posbench.evaluation.subject import Answers, Bools, Ranked, Ranker, Subject
from posbench.processes import World
from posbench.results.estimate import estimate
from posbench.run_folder.rows import EvaluationRow

_TEXT = 2**16  # tokens of the text that problems are made of, at most


@dataclasses.dataclass(frozen=True, eq=False)
class Problems:
    """The problems of a row. A counts the tokens of the longest answer; a shorter one has the last of them."""

    ids: Ids  # (n, C + 1)
    candidates: Ids  # (n, A, K)
    right: Ids  # (n, A) into candidates; -1 where there is no choice
    answer: Bools  # (n, A), which tokens are of the answer
    trivial: float | None  # share of the choices that a trivial reader has right; None: there is no such reader

    @classmethod
    def of(cls, choices: Sequence[Choice]) -> "Problems":
        """Problems of one length, with equally many candidates."""
        longest = max(len(one.right) for one in choices)
        missing = [longest - len(one.right) for one in choices]
        ids = np.stack([one.ids for one in choices])
        candidates = np.repeat(ids[:, -longest:, None], choices[0].candidates.shape[1], axis=2)
        for number, one in enumerate(choices):
            candidates[number, missing[number] :] = one.candidates
        rights = (np.pad(one.right, (n, 0), constant_values=-1) for n, one in zip(missing, choices, strict=True))
        said = [(one.trivial == one.right)[one.right >= 0] for one in choices if one.trivial is not None]
        return cls(
            ids=ids,
            candidates=candidates,
            right=np.stack(list(rights)),
            answer=np.arange(longest) >= np.array(missing)[:, None],
            trivial=float(np.concatenate(said).mean()) if said else None,
        )

    @property
    def sha256(self) -> str:
        """Identity of the problems; rows that share it are paired. The candidates have the last token of each."""
        digest = hashlib.sha256()
        for part in (self.ids[:, :-1], self.candidates, self.right):
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
    ids = (np.asarray(split.ids[start : start + windows.length], dtype=np.int64) for start in windows.starts)
    return Problems.of([posed(window, number) for number, window in enumerate(ids)])


def ranked(subject: Subject, problems: Problems, batch_tokens: int, world: World) -> Ranked:
    """What a model predicts for the answers.

    Args:
        batch_tokens: tokens per forward pass, at least one problem.
        world: the processes that share the forward passes; all return the whole result.
    """
    assert isinstance(subject, Ranker)
    count, tokens = problems.ids.shape

    def of(some: slice) -> Ranked:
        return subject.ranked(problems.ids[some], problems.candidates[some], some.start)

    return Ranked.joined(in_batches(world, count, tokens - 1, batch_tokens, of))


def with_numbers(row: EvaluationRow, problems: Problems, ranked: Ranked) -> EvaluationRow:
    """The row with its numbers."""
    problem, place = np.nonzero(problems.right >= 0)
    right, nll = problems.right[problem, place], ranked.nll[problem, place]
    check_finite(nll, "candidates")
    number, answer = np.arange(len(nll)), problems.right.shape[1]
    of_right = nll[number, right]
    others = nll.copy()
    others[number, right] = np.inf
    said = (ranked.likeliest == problems.ids[:, -answer:]) | ~problems.answer
    row = dataclasses.replace(
        row,
        mean_context=float((row.length - answer + 1 + place).mean()),
        chance=1 / nll.shape[1],
        trivial=problems.trivial,
        exact_match=float(said.all(axis=1).mean()),
    )
    return answered(row, Answers(of_right, of_right < others.min(axis=1)), problem)


def answered(row: EvaluationRow, answers: Answers, problem: Ids) -> EvaluationRow:
    """The row with the numbers of its answers.

    Args:
        problem: (n,) the number of the problem that each of the n answered tokens belongs to.
    """
    tokens, sums = np.bincount(problem), np.bincount(problem, answers.nll)
    interval = estimate(sums[None], tokens) if len(tokens) > 1 else None
    return dataclasses.replace(
        row,
        n_tokens=len(problem),
        n_blocks=len(tokens),
        nll=float(answers.nll.mean()),
        accuracy=float(answers.correct.mean()),
        ci_low=None if interval is None else interval.low(),
        ci_high=None if interval is None else interval.high(),
        ci_over=None if interval is None else "problems",
    )
