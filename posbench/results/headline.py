"""One run in a few numbers: for W&B's summary, an objective, and a line of text."""

from typing import Any

import pandas as pd

from posbench.results import compare
from posbench.results.compare import READERS, Losses
from posbench.results.tasks import task_rows

Headline = dict[str, Any]  # numbers, texts or None
TEXTS = ("learned", "uses_context")  # yes, no or not resolved; all others are numbers
# the most important values of a run on text
MAIN = ("learned", "nll_1x", "rise_4x", "rise_16x", "reach", "uses")
MAIN_OF_TASK = ("learned", "accuracy_1x", "accuracy_2x", "accuracy_4x")
ALWAYS = ("rise_4x", "rise_16x")  # named even where they were not measured


def headline(frame: pd.DataFrame) -> Headline:
    """Return the values of one run by name, of its newest checkpoint. None: not
    measured, or undefined.

    On text: `learned` and `uses_context` (yes, no, not resolved), whether it beats the
    readers `ngram` and `cached_ngram`; `nll_<r>x`, nats per token at r training
    lengths; `rise_<r>x`, which is `nll_<r>x` minus `nll_1x`; `reach` and `uses` in
    tokens, None if the reader is not beaten. On a task: `learned` (yes, no),
    `steps_to_gate`, `nll_1x`, and `accuracy_<r>x` and `exact_match_<r>x`, shares at r
    times the longest trained length.
    """
    as_done = frame.assign(run_status="done", repeated=False)
    values = (
        _of_text(as_done) if frame["trained_task"].isna().all() else _of_task(as_done)
    )
    return {name: None if pd.isna(value) else value for name, value in values.items()}


def _of_text(frame: pd.DataFrame) -> dict[str, Any]:
    losses = Losses(compare.main_rows(frame))
    values: dict[str, Any] = dict.fromkeys((*TEXTS, "nll_1x", *ALWAYS, "reach", "uses"))
    for label in losses.seeds:  # one label, or none without rows
        row = compare.numbers(losses, label, schemes=1)
        values |= {n: row[n] for n in (*TEXTS, "uses", *READERS) if n in row} | {
            "reach": row.get("holds_to")
        }
        for length in losses.lengths(label):
            ratio, level = (
                f"{length / losses.train_length:g}x",
                losses.level(label, length),
            )
            values[f"nll_{ratio}"] = (
                None if level is None else losses.estimate(level).mean
            )
            values |= (
                {f"rise_{ratio}": row.get(f"rise_{ratio}")}
                if length > losses.train_length
                else {}
            )
    return values


def _of_task(frame: pd.DataFrame) -> dict[str, Any]:
    rows, steps = task_rows(frame), frame["steps_to_gate"].iloc[0]
    values: dict[str, Any] = dict.fromkeys(
        ("learned", "steps_to_gate", "nll_1x", "accuracy_1x", "exact_match_1x")
    )
    values |= {"steps_to_gate": None if pd.isna(steps) else int(steps)}
    values |= (
        {"learned": "yes" if rows["seed_learned"].iloc[0] else "no"}
        if len(rows)
        else {}
    )
    for row in (
        rows[rows["as_trained"] & (rows["length_ratio"] >= 1)]
        .sort_values("length_ratio")
        .to_dict("records")
    ):
        values |= {
            f"{name}_{row['length_ratio']:.3g}x": row[name]
            for name in ("accuracy", "exact_match")
        }
        values |= (
            {"nll_1x": row["nll"]}
            if row["length_ratio"] == 1 and row["status"] == "ok"
            else {}
        )
    return values
