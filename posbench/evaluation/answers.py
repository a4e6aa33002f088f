"""The results of a run on a task: the share of right answers by problem length, and whether it learned.

All of it is of the newest checkpoint on the fixed test problems. A place is where it was tested: the task itself or a
variant, a problem length, what positions were shifted by, and the model as it was trained or as an extension or a
window changed it. Files may come from strangers: a share that is none is missing.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from posbench.config.external import AnyConfig
from posbench.evaluation.intervals import clopper_pearson
from posbench.evaluation.measure import Headline, Learned, Measure
from posbench.run_folder.jsonl import number, read_jsonl
from posbench.run_folder.names import METRICS
from posbench.run_folder.rows import PLAIN, BlockRow, EvaluationRow, evaluation_blocks, headline_split, newest_of_split

GATE = 0.99  # share of right tokens at every trained length from which on a run has learned the task
RESAMPLES = 2000
MOST_PROBLEMS = 4096  # that are resampled; a test has hundreds

Integers = NDArray[np.int64]


class Place(NamedTuple):
    """The setting of a test."""

    variant: str  # options that differ from those trained on, such as depth=0.5; "" for none
    ratio: float  # problem length / longest trained one
    offset: int  # that all positions were shifted by
    kind: str = PLAIN  # how the model was changed: plain, windowed, or an extension's name

    @property
    def as_trained(self) -> bool:
        """Whether task, positions and model are those of training, whatever the length."""
        return (self.variant, self.offset, self.kind) == ("", 0, PLAIN)


TRAINED = Place("", 1.0, 0)  # the longest trained problems, as they were trained on


@dataclasses.dataclass(frozen=True, eq=False)
class Answer:
    """The answers at one place."""

    row: EvaluationRow
    correct: Integers | None  # right tokens per problem; None where the file lacks them
    tokens: Integers | None  # of its answer

    @property
    def accuracy(self) -> float | None:
        """Share of right tokens, each predicted from the true ones before it."""
        return _share(self.row.accuracy) if self.row.status == "ok" else None

    @property
    def exact_match(self) -> float | None:
        """Share of problems whose every token is right."""
        return _share(self.row.exact_match) if self.row.status == "ok" else None

    @property
    def chance(self) -> float | None:
        """Accuracy of guessing; None in rows of earlier versions."""
        return _share(self.row.chance)

    @property
    def trivial(self) -> float | None:
        """Accuracy of the task's trivial reader on these problems; None in rows of earlier versions."""
        return _share(self.row.trivial)

    @property
    def status(self) -> str:
        """The row's status; `failed` if it has no number."""
        return "failed" if self.row.status == "ok" and self.accuracy is None else self.row.status

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % of the accuracy of this very checkpoint, over problems; None if they are not known or mostly repeat.

        The percentile bootstrap over problems, whose tokens are right or wrong together. If all tokens are right, or
        none is, it has no width. The bound is then that of the share of such problems (`exact_interval`).
        """
        if self.correct is None or self.tokens is None or not 2 <= len(self.tokens) <= MOST_PROBLEMS:
            return None
        if self.row.is_repetitive or self.correct.sum() in (0, self.tokens.sum()):
            return self.exact_interval
        drawn = _resamples(len(self.tokens))
        low, high = np.quantile((drawn @ self.correct) / (drawn @ self.tokens), (0.025, 0.975))
        return float(low), float(high)

    @property
    def exact_interval(self) -> tuple[float, float] | None:
        """95 % of the share of problems whose every token is right (Clopper & Pearson).

        It counts problems that differ: equal ones have equal answers. None if fewer than half of them differ.
        """
        if self.correct is None or self.tokens is None or self.row.is_repetitive:
            return None
        count = len(self.tokens) if self.row.n_distinct is None else min(self.row.n_distinct, len(self.tokens))
        return clopper_pearson(round(count * float((self.correct == self.tokens).mean())), count)


@dataclasses.dataclass(frozen=True, eq=False)
class Answers(Measure):
    """All answers of a run on a task, and how soon it had learned."""

    at: dict[Place, Answer]
    steps_to_gate: int | None  # of the first validation that reached it; None: none did

    protocol: ClassVar = "problems"
    main: ClassVar = ("learned", "accuracy_1x", "accuracy_2x", "accuracy_4x")
    columns: ClassVar = (
        "task", "problem_length", "length_ratio", "offset", "accuracy", "exact_match", "learned", "nll", "status",
    )  # fmt: skip

    @classmethod
    def of(cls, folder: Path, config: AnyConfig, rows: Sequence[EvaluationRow]) -> "Answers":
        blocks = evaluation_blocks(folder)
        own = [row for row in rows if row.protocol == cls.protocol]
        newest = newest_of_split(own, headline_split(own, config.evaluation.split))
        at = {place_of(row): _answer(row, blocks.get(row.blocks_key, [])) for row in newest}
        return cls(dict(sorted(at.items())), steps_to_gate(read_jsonl(folder / METRICS)))

    @staticmethod
    def order(row: EvaluationRow) -> tuple[Any, ...]:
        """The task as trained first, then with shifted positions, then narrowed, extended or varied."""
        varied = ":" in (row.task or "") or row.kind != PLAIN
        return varied, bool(row.offset), row.curve_name, row.offset or 0, row.length_ratio

    @property
    def learned(self) -> Learned | None:
        """Whether the gate is reached at every trained length that was tested; None if the longest was not tested."""
        trained = [answer for place, answer in self.at.items() if place.ratio <= 1 and place.as_trained]
        if not any(answer.row.length_ratio == 1 for answer in trained):
            return None
        return "yes" if all(answer.accuracy is not None and answer.accuracy >= GATE for answer in trained) else "no"

    @property
    def headline(self) -> Headline:
        """Values of the run by name.

        `learned`: yes or no. `steps_to_gate`. `nll_1x` in nats per token of the answers. `accuracy_<r>x` and
        `exact_match_<r>x` as shares, at r times the longest trained problems.
        """
        plain = {place.ratio: one for place, one in self.at.items() if place.ratio >= 1 and place.as_trained}
        found: Headline = {
            "learned": self.learned,
            "steps_to_gate": self.steps_to_gate,
            "nll_1x": plain[1.0].row.nll if 1.0 in plain and plain[1.0].status == "ok" else None,
            "accuracy_1x": None,
            "exact_match_1x": None,
        }
        found |= {f"accuracy_{ratio:.3g}x": one.accuracy for ratio, one in plain.items()}
        return found | {f"exact_match_{ratio:.3g}x": one.exact_match for ratio, one in plain.items()}


def place_of(row: EvaluationRow) -> Place:
    return Place((row.task or "").partition(":")[2], row.length_ratio, row.offset or 0, row.kind)


def steps_to_gate(metrics: Sequence[Mapping[str, Any]]) -> int | None:
    """The first step whose validation reached the gate, by the rows of `metrics.jsonl`; None if none did.

    Of rows of one step, as a continued run has them, the later one counts.
    """
    by_step = {number(row.get("step")): _share(number(row.get("validation/accuracy"))) for row in metrics}
    reached = [step for step, share in by_step.items() if step is not None and share is not None and share >= GATE]
    return int(min(reached)) if reached else None


def _answer(row: EvaluationRow, blocks: Sequence[BlockRow]) -> Answer:
    pairs = [(block.n_correct, block.n_tokens) for block in blocks]
    known = [(right, of) for right, of in pairs if right is not None and of is not None and 0 <= right <= of >= 1]
    if not known or len(known) < len(pairs):
        return Answer(row, None, None)
    correct, tokens = np.array(known, dtype=np.int64).T
    return Answer(row, correct, tokens)


@functools.lru_cache(maxsize=1)
def _resamples(count: int) -> NDArray[np.float64]:
    """(RESAMPLES, count): how often each problem is drawn, the same for every run."""
    rng = np.random.default_rng(0)
    return rng.multinomial(count, np.full(count, 1 / count), size=RESAMPLES).astype(np.float64)


def _share(value: float | None) -> float | None:
    return value if value is not None and 0 <= value <= 1 else None
