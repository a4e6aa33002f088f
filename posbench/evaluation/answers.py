"""The results of a run on a task: the share of right answers by problem length, and whether it learned.

All of it is of the newest checkpoint on the fixed test problems. A place is where it was tested: the task itself or a
variant, a problem length, what positions were shifted by, and the model as it was trained or as an extension or a
window changed it. Files may come from strangers: a share that is none is missing.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from posbench.config.external import AnyConfig
from posbench.evaluation.measure import Headline, Learned, Measure
from posbench.run_folder.jsonl import number, read_jsonl
from posbench.run_folder.names import METRICS
from posbench.run_folder.rows import PLAIN, EvaluationRow, headline_split, newest_of_split

GATE = 0.99  # share of right tokens at every trained length from which on a run has learned the task


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
        own = [row for row in rows if row.protocol == cls.protocol]
        newest = newest_of_split(own, headline_split(own, config.evaluation.split))
        at = {place_of(row): Answer(row) for row in newest}
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


def _share(value: float | None) -> float | None:
    return value if value is not None and 0 <= value <= 1 else None
