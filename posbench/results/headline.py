"""One run in a few numbers: for W&B's summary, an objective, and a line of text."""

from typing import Any

import pandas as pd

from posbench.results import compare
from posbench.results.compare import READERS, Losses
from posbench.results.tasks import task_rows

Headline = dict[str, Any]  # numbers, texts or None
TEXTS = ("learned", "uses_context")  # yes, no or not resolved; all others are numbers
ALWAYS = ("rise_4x", "rise_16x")  # named even where they were not measured


def headline(frame: pd.DataFrame) -> Headline:
    """Return the values of one run by name, of its newest checkpoint.

    None: not measured, or undefined. On text: `learned` and `uses_context` (yes, no,
    not resolved), whether it beats the readers `ngram` and `cached_ngram`; `nll_<r>x`,
    nats per token at r training lengths; `rise_<r>x`, which is `nll_<r>x` minus
    `nll_1x`; `reach` and `uses` in tokens, None if the reader is not beaten. On a task:
    `learned` (yes, no), `steps_to_gate`, `nll_1x`, and `accuracy_<r>x` and
    `exact_match_<r>x`, shares at r times the longest trained length.
    """
    frame = frame.assign(run_status="done", repeated=False)
    has_task = frame["trained_task"].notna().any()
    values = _of_task(frame) if has_task else _of_text(frame)
    return {name: None if pd.isna(value) else value for name, value in values.items()}


def _of_text(frame: pd.DataFrame) -> dict[str, Any]:
    losses = Losses(compare.main_rows(frame))
    values: dict[str, Any] = dict.fromkeys((*TEXTS, "nll_1x", *ALWAYS, "reach", "uses"))
    for label in losses.seeds:  # one label, or none without rows
        numbers = compare.numbers(losses, label, schemes=1)
        for name in (*TEXTS, "uses", *READERS):
            if name in numbers:
                values[name] = numbers[name]
        values["reach"] = numbers.get("holds_to")

        for length in losses.lengths(label):
            ratio = f"{length / losses.train_length:g}x"
            level = losses.level(label, length)
            values[f"nll_{ratio}"] = None
            if not level.empty:
                values[f"nll_{ratio}"] = losses.estimate(level).mean
            if length > losses.train_length:
                values[f"rise_{ratio}"] = numbers.get(f"rise_{ratio}")
    return values


def _of_task(frame: pd.DataFrame) -> dict[str, Any]:
    names = ("learned", "steps_to_gate", "nll_1x", "accuracy_1x", "exact_match_1x")
    values: dict[str, Any] = dict.fromkeys(names)
    steps = frame["steps_to_gate"].iloc[0]
    if pd.notna(steps):
        values["steps_to_gate"] = int(steps)

    rows = task_rows(frame)
    if len(rows):
        values["learned"] = "yes" if rows["seed_learned"].iloc[0] else "no"
    rows = rows[rows["as_trained"] & (rows["length_ratio"] >= 1)]
    for row in rows.sort_values("length_ratio").to_dict("records"):
        ratio = f"{row['length_ratio']:.3g}x"
        values[f"accuracy_{ratio}"] = row["accuracy"]
        values[f"exact_match_{ratio}"] = row["exact_match"]
        if ratio == "1x" and row["status"] == "ok":
            values["nll_1x"] = row["nll"]
    return values
