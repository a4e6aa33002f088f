"""One run in a few numbers: for W&B's summary, an objective, and a line of text."""

import math

import pandas as pd

from posbench.results import compare
from posbench.results.compare import Losses
from posbench.results.tasks import task_rows

Headline = dict[str, float | str | None]
TEXTS = ("learned", "uses_context")  # yes, no or not resolved; all others are numbers
MAIN = ("learned", "nll_1x", "rise_4x", "rise_16x", "reach", "uses")  # of a run on text: those that say most
MAIN_OF_TASK = ("learned", "accuracy_1x", "accuracy_2x", "accuracy_4x")
ALWAYS = (4, 16)  # training lengths whose rise is named even where it was not measured


def headline(frame: pd.DataFrame) -> Headline:
    """Return the values of one run by name, of its newest checkpoint. None: not measured, or undefined.

    Of text: `learned` and `uses_context` (yes, no, not resolved): whether it beats the simple readers `ngram` and
    `cached_ngram`, where these are known; `nll_1x`, `nll_<r>x`, nats per token at r training lengths; `rise_<r>x`, that
    less `nll_1x`; `reach` and `uses` in tokens, as `compare.holds_to` and `compare.uses` by bounds over documents, None
    where the reader is known and not beaten. Of a task: `learned` (yes, no), `steps_to_gate`, `nll_1x` of the
    answers, and `accuracy_<r>x` and `exact_match_<r>x`, shares at r times the longest trained problems.

    Args:
        frame: the rows of that run, finished or not.
    """
    as_done = frame.assign(run_status="done", repeated=False)
    return _of_text(as_done) if frame["trained_task"].isna().all() else _of_task(as_done)


def _of_text(frame: pd.DataFrame) -> Headline:
    rows = compare.main_rows(frame)
    values: Headline = {
        "learned": None,
        "uses_context": None,
        "nll_1x": None,
        **{f"rise_{ratio}x": None for ratio in ALWAYS},
    }
    nothing: Headline = {"reach": None, "uses": None}
    if not len(rows):
        return values | nothing
    losses = Losses(rows)
    (label,) = losses.seeds
    gate, uses_context = (compare.beats(losses, label, reader) for reader in compare.READERS)
    values |= {"learned": gate, "uses_context": uses_context}
    for reader in compare.READERS:
        of_reader = losses.level(label, losses.train_length, reader)
        values |= {} if of_reader is None else {reader: losses.estimate(of_reader).mean}
    for length in losses.lengths(label):
        ratio = f"{length / losses.train_length:g}x"
        level, rise = losses.level(label, length), losses.rise(label, length)
        values[f"nll_{ratio}"] = None if level is None else losses.estimate(level).mean
        if length > losses.train_length:
            values[f"rise_{ratio}"] = None if rise is None else losses.estimate(rise).mean
    if values["nll_1x"] is None or not compare.may_claim(gate):
        return values | nothing
    used = compare.uses(losses, label) if compare.may_claim(uses_context) else None
    return values | {"reach": compare.holds_to(losses, label), "uses": used}


def _of_task(frame: pd.DataFrame) -> Headline:
    rows = task_rows(frame)
    steps = frame["steps_to_gate"].iloc[0]
    values: Headline = {
        "learned": ("yes" if rows["seed_learned"].iloc[0] else "no") if len(rows) else None,
        "steps_to_gate": None if pd.isna(steps) else int(steps),
        **dict.fromkeys(("nll_1x", "accuracy_1x", "exact_match_1x")),
    }
    for row in rows[rows["as_trained"] & (rows["length_ratio"] >= 1)].sort_values("length_ratio").to_dict("records"):
        for name in ("accuracy", "exact_match"):
            values[f"{name}_{row['length_ratio']:.3g}x"] = None if math.isnan(row[name]) else row[name]
        if row["length_ratio"] == 1 and row["status"] == "ok":
            values["nll_1x"] = row["nll"]
    return values
