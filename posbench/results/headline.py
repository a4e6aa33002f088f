"""One run in a few numbers: for W&B's summary, an objective, and a line of text."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import pandas as pd

from posbench.results import compare
from posbench.results.compare import Losses
from posbench.results.comparison import Interval
from posbench.results.tasks import task_rows

Headline = dict[str, Any]  # numbers, texts or None
TEXTS = ("learned", "beats_reader")  # yes, no or not resolved; all others are numbers
ALWAYS = (4, 16)  # multiples whose rise is named even where it was not measured


class Measure(NamedTuple):
    """A value of a headline: its kind, and the length as a multiple of the training
    length (of problems: of the longest trained); None: it has no length.
    """

    kind: str
    ratio: float | None = None

    @property
    def name(self) -> str:
        return self.kind if self.ratio is None else f"{self.kind}_{self.ratio:.6g}x"


def headline(frame: pd.DataFrame) -> Headline:
    """Return the values of one run by name, of its newest checkpoint.

    None: not measured, or undefined. On text: `learned` and `beats_reader` (yes, no,
    not resolved), whether it beats the readers `ngram` and `mixture`; `nll_<r>x`, nats
    per token at r training lengths; `rise_<r>x`, which is `nll_<r>x` minus `nll_1x`;
    `reach` in tokens, and `uses`: it uses more than so many tokens; both None if it has
    not learned. On a task:
    `learned` (yes, no), `steps_to_gate`, `nll_1x`, and `accuracy_<r>x` and
    `exact_match_<r>x`, shares at r times the longest trained length.
    """
    return {measure.name: value for measure, value in measures(frame).items()}


def measures(frame: pd.DataFrame) -> dict[Measure, Any]:
    """Return the values of `headline` by what they measure."""
    frame = frame.assign(run_status="done", repeated=False)
    if not frame["trained_task"].notna().any():
        return _known(_of_text(frame))

    values: dict[Measure, Any] = {
        Measure("learned"): None,
        Measure("steps_to_gate"): None,
        Measure("nll", 1): None,
        Measure("accuracy", 1): None,
        Measure("exact_match", 1): None,
    }
    steps = frame["steps_to_gate"].iloc[0]
    if pd.notna(steps):
        values[Measure("steps_to_gate")] = int(steps)

    rows = task_rows(frame)
    if len(rows):
        values[Measure("learned")] = "yes" if rows["seed_learned"].iloc[0] else "no"
    rows = rows[rows["as_trained"] & (rows["length_ratio"] >= 1)]
    for row in rows.sort_values("length_ratio").to_dict("records"):
        ratio = float(f"{row['length_ratio']:.3g}")
        values[Measure("accuracy", ratio)] = row["accuracy"]
        values[Measure("exact_match", ratio)] = row["exact_match"]
        if ratio == 1 and row["status"] == "ok":
            values[Measure("nll", 1)] = row["nll"]
    return _known(values)


def _known(values: dict[Measure, Any]) -> dict[Measure, Any]:
    """Return values in which what is undefined is None."""
    return {each: None if pd.isna(value) else value for each, value in values.items()}


def _of_text(frame: pd.DataFrame) -> dict[Measure, Any]:
    losses = Losses.of(frame)
    values: dict[Measure, Any] = {Measure(name): None for name in TEXTS}
    values[Measure("nll", 1)] = None
    for longer in ALWAYS:
        values[Measure("rise", longer)] = None
    values[Measure("reach")] = None
    values[Measure("uses")] = None
    for label in losses.seeds:  # one label, or none without rows
        numbers = compare.numbers(losses, label, schemes=1)
        rises: Mapping[float, Interval | None] = {}
        if numbers:
            values[Measure("learned")] = numbers.learned
            values[Measure("beats_reader")] = numbers.beats_reader
            values[Measure("uses")] = numbers.uses
            values[Measure("reach")] = numbers.holds_to
            for reader, its_loss in numbers.readers.items():
                values[Measure(reader)] = its_loss
            rises = numbers.rises

        for length in losses.lengths(label):
            ratio = length / losses.train_length
            level = losses.level(label, length)
            loss = None if level.empty else losses.estimate(level).mean
            values[Measure("nll", ratio)] = loss
            if ratio > 1:
                rise = rises.get(ratio)
                values[Measure("rise", ratio)] = rise.mean if rise else None
    return values
