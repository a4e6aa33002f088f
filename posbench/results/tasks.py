"""Schemes on a task: seeds that learned it, accuracy by length of the problems, and
exact tests against a reference.

A run has learned if it reaches the gate at every trained length. Medians, ranges and
tests are over all seeds, learned or not: to keep only those that learned would select
by the outcome. A seed that diverged has no answer right.
"""

import math
from typing import Any

import numpy as np
import pandas as pd

from posbench.results.compare import (
    ALPHA,
    ENOUGH_SEEDS,
    HALF,
    NOT_RESOLVED,
    reference_label,
)
from posbench.results.frame import GATE
from posbench.run.rows import PLAIN

RATIOS = (2.0, 4.0)  # times the longest trained problems, where accuracies are tested
SEEDS_OF_TASK = 10  # that tell schemes apart on a task; words need `ENOUGH_SEEDS`
LEAST = 0.01  # a smaller difference of shares has no word
MOST_ORDERS = 200_000  # orders of seeds to enumerate; ten against ten have 184,756
_PLACE = ["of_task", "variant", "offset", "length_ratio"]


def as_trained(rows: pd.DataFrame) -> pd.Series:
    """Return which rows have the task, the positions and the model of the training, at
    any length.
    """
    is_variation = rows["task"].astype(str).str.contains(":")
    is_plain = (rows["offset"].fillna(0) == 0) & (rows["variant"] == PLAIN)
    return (rows["protocol"] == "problems") & ~is_variation & is_plain


def task_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the newest rows on problems, each seed once, of runs for which it is known
    whether they learned.

    `of_task` is the option that a test varies, such as depth=0.5. `seed_learned` tells
    whether the run learned. One that diverged has no answer right anywhere.
    """
    runs = frame[~frame["repeated"]]
    rows = runs[(runs["protocol"] == "problems") & runs["newest"]]
    rows = rows[rows["run_status"] == "done"].copy()
    rows["of_task"] = [task.partition(":")[2] for task in rows["task"]]
    rows["offset"] = rows["offset"].fillna(0)
    rows["as_trained"] = as_trained(rows)
    rows["steps_to_gate"] = rows["steps_to_gate"].astype("float64")
    not_measured = rows["status"] != "ok"
    rows.loc[not_measured, ["accuracy", "exact_match"]] = math.nan

    trained = rows[rows["as_trained"] & (rows["length_ratio"] <= 1)]
    below_gate = trained.loc[~(trained["accuracy"] >= GATE), "folder"]
    tested = trained.loc[trained["length_ratio"] == 1, "folder"]
    rows["seed_learned"] = ~rows["folder"].isin(below_gate)
    rows = rows[rows["folder"].isin(tested)]

    parts = [rows]
    places = rows.drop_duplicates(_PLACE).assign(
        accuracy=0.0,
        exact_match=0.0,
        status="ok",
        seed_learned=False,
        steps_to_gate=math.nan,
    )
    diverged = runs[runs["run_status"] == "diverged"].drop_duplicates("folder")
    facts = diverged[["folder", "label", "encoding", "seed"]]
    for run in facts.to_dict("records"):
        parts.append(places.assign(**run))
    return pd.concat(parts, ignore_index=True)


def accuracies(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a row per scheme of one setting and place where it was tested.

    A place is a variation, variant, offset and length ratio. `accuracy` (of tokens) is
    the median over all seeds, NaN unless `status` is ok.
    """
    places = []
    for (label, *place), group in task_rows(frame).groupby(["label", *_PLACE]):
        failures = group.loc[group["status"] != "ok", "status"]
        accuracy = group["accuracy"]
        if len(failures):
            accuracy = accuracy * math.nan
        row = dict(zip(_PLACE, place, strict=True))
        row["label"] = label
        row["status"] = failures.iloc[0] if len(failures) else "ok"
        row["seeds"] = len(group)
        row["as_trained"] = group["as_trained"].iloc[0]
        row["trivial"] = group["trivial"].iloc[0]
        row["accuracy"] = accuracy.median()
        row["accuracy_min"] = accuracy.min()
        row["accuracy_max"] = accuracy.max()
        places.append(row)
    return pd.DataFrame(places)


def compare_tasks(frame: pd.DataFrame, reference: str | None = None) -> pd.DataFrame:
    """Compare the schemes of one setting on a task.

    The default reference is `rope`, else `none`, else the first one.

    Returns:
        A row per scheme: the most accurate beyond trained lengths first, schemes that
        have not learned last. `seeds`; `learned` (how many did), with the 95 % interval
        of the share by Clopper & Pearson (1934); `ranked` (at least half learned);
        `steps_to_gate` (median); `accuracy_1x` ... as in `accuracies`. Exact tests
        against the reference permute the seeds: `learned_p`, `accuracy_2x_p`,
        `accuracy_4x_p`, adjusted by Bonferroni for all tests of the table, each with a
        `_difference` and a `_word`. A test that may not be made has none of these.
        `attrs`: `reference`, `tests`.
    """
    rows = task_rows(frame)
    if rows.empty:
        return pd.DataFrame()
    labels = sorted(rows["label"].unique())
    choices = (reference_label(frame, reference), "none", labels[0])
    base = next(label for label in choices if label in labels)

    places = accuracies(frame)
    places = places[places["as_trained"]]
    schemes = {}
    tests = []
    for label in labels:
        of_label = rows[rows["label"] == label]
        schemes[label] = _scheme(of_label, places[places["label"] == label])
        if label != base:
            of_base = rows[rows["label"] == base]
            tests += [(label, *test) for test in _tests(of_label, of_base)]
    for label, name, shares in tests:
        schemes[label] |= _result(name, shares, len(tests))

    order = ["ranked", "accuracy_beyond", "accuracy_1x", "label"]
    table = pd.DataFrame(schemes.values()).sort_values(
        order, ascending=[False, False, False, True], ignore_index=True
    )
    table.attrs = {"reference": base, "tests": len(tests)}
    return table


def _scheme(rows: pd.DataFrame, places: pd.DataFrame) -> dict[str, Any]:
    """Return a scheme's columns that need no reference."""
    from scipy import stats

    runs = rows.drop_duplicates("folder")
    learned = int(runs["seed_learned"].sum())
    share = stats.binomtest(learned, len(runs)).proportion_ci(method="exact")
    steps = runs["steps_to_gate"].fillna(math.inf)
    row = {
        "label": runs["label"].iloc[0],
        "encoding": runs["encoding"].iloc[0],
        "seeds": len(runs),
        "learned": learned,
        "learned_low": float(share.low),
        "learned_high": float(share.high),
        "ranked": learned >= HALF * len(runs),
        "steps_to_gate": float(steps.median()),
    }
    for place in places.to_dict("records"):
        name = f"accuracy_{place['length_ratio']:.3g}x"
        row[name] = place["accuracy"]
        row[f"{name}_min"] = place["accuracy_min"]
        row[f"{name}_max"] = place["accuracy_max"]
        row[f"{name}_status"] = place["status"]
        row[f"{name}_trivial"] = place["trivial"]

    # Schemes are ordered by it: a place without a number counts as 0.
    beyond = places.loc[places["length_ratio"] > 1, "accuracy"].fillna(0)
    row["accuracy_beyond"] = beyond.mean() if row["ranked"] else math.nan
    return row


def _tests(
    scheme: pd.DataFrame, base: pd.DataFrame
) -> list[tuple[str, list[pd.Series]]]:
    """Return the tests of a scheme against the reference that may be made.

    Each has the name of its column, and the shares of both. Accuracies are compared if
    most seeds of both have learned, and all were tested alike.
    """
    scheme_learned = _seeds_learned(scheme)
    base_learned = _seeds_learned(base)
    if min(len(scheme_learned), len(base_learned)) < ENOUGH_SEEDS:
        return []

    tests = [("learned", [scheme_learned, base_learned])]
    if min(scheme_learned.mean(), base_learned.mean()) < HALF:
        return tests
    n_runs = len(scheme_learned) + len(base_learned)
    for ratio in RATIOS:
        of_scheme = _tested_at(scheme, ratio)
        of_base = _tested_at(base, ratio)
        both = pd.concat([of_scheme, of_base])
        is_measured = (both["status"] == "ok").sum() == n_runs
        is_alike = (both[["targets_sha256", "dtype"]].nunique() <= 1).all()
        if is_measured and is_alike:
            shares = [of_scheme["accuracy"], of_base["accuracy"]]
            tests.append((f"accuracy_{ratio:g}x", shares))
    return tests


def _seeds_learned(rows: pd.DataFrame) -> pd.Series:
    """Return for each seed whether it learned, as 0 or 1."""
    return rows.drop_duplicates("folder")["seed_learned"].astype(float)


def _tested_at(rows: pd.DataFrame, ratio: float) -> pd.DataFrame:
    return rows[rows["as_trained"] & (rows["length_ratio"] == ratio)]


def _result(name: str, shares: list[pd.Series], tests: int) -> dict[str, Any]:
    """Return the columns of an exact test, adjusted for so many tests.

    It permutes two sets of seeds, which are not paired.
    """
    from scipy import stats

    test = stats.permutation_test(
        [of_seeds.to_numpy() for of_seeds in shares],
        lambda a, b, axis: a.mean(axis=axis) - b.mean(axis=axis),
        permutation_type="independent",
        vectorized=True,
        n_resamples=MOST_ORDERS,
        batch=10_000,
        rng=np.random.default_rng(0),
    )
    p = min(1.0, tests * float(test.pvalue))
    difference = float(test.statistic)

    words = ("worse", "better")
    if name == "learned":
        words = ("learned by fewer seeds", "learned by more seeds")
    word = words[1] if difference > 0 else words[0]
    if p >= ALPHA or abs(difference) < LEAST:
        word = NOT_RESOLVED
    return {
        f"{name}_p": p,
        f"{name}_difference": difference,
        f"{name}_word": word,
    }
