"""Schemes on a task: seeds that learned it, accuracy by length of the problems, and
exact tests against a reference.

A run has learned if it reaches the gate at every trained length. Medians, ranges and
tests are over all seeds, learned or not: to keep only those that learned would select
by the outcome. A seed that diverged has no answer right.
"""

import dataclasses
import math

import numpy as np
import pandas as pd

from posbench.results.compare import (
    ALPHA,
    ENOUGH_SEEDS,
    reference_label,
)
from posbench.results.comparison import (
    ExactTest,
    Share,
    TaskComparison,
    TaskScheme,
)
from posbench.results.frame import GATE
from posbench.results.words import NOT_RESOLVED
from posbench.run.rows import PLAIN

RATIOS = (2.0, 4.0)  # times the longest trained problems, where accuracies are tested
SEEDS_OF_TASK = 10  # that tell schemes apart on a task; words need `ENOUGH_SEEDS`
# Accuracies are compared if such a share of the seeds has learned the task.
ENOUGH_LEARNED = 1 / 2
LEAST = 0.01  # a smaller difference of shares has no word
MOST_ORDERS = 200_000  # orders of seeds to enumerate; ten against ten have 184,756
Pair = tuple[pd.Series, pd.Series]  # shares by seed, of a scheme and of the reference
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


def compare_tasks(
    frame: pd.DataFrame, reference: str | None = None
) -> TaskComparison | None:
    """Compare the schemes of one setting on a task; None if no run was tested.

    The default reference is `rope`, else `none`, else the first one. Exact tests
    against it permute the seeds, adjusted by Bonferroni for all tests of the table.
    """
    rows = task_rows(frame)
    if rows.empty:
        return None
    labels = sorted(rows["label"].unique())
    asked = reference_label(frame, reference)
    choices = (asked, "none", labels[0])
    base = str(next(label for label in choices if label in labels))
    of_base = rows[rows["label"] == base]

    places = accuracies(frame)
    places = places[places["as_trained"]]
    schemes = []
    pairs = {}
    for label in labels:
        of_label = rows[rows["label"] == label]
        schemes.append(_scheme(of_label, places[places["label"] == label]))
        if label != base:
            pairs[label] = _pairs(of_label, of_base)

    n_tests = sum(
        len(of_learned) + len(by_ratio) for of_learned, by_ratio in pairs.values()
    )
    tested = []
    for scheme in schemes:
        learned_test = None
        tests = {}
        of_learned, by_ratio = pairs.get(scheme.label, ([], {}))
        for pair in of_learned:
            words = ("learned by fewer seeds", "learned by more seeds")
            learned_test = _result(pair, n_tests, words)
        for ratio, pair in by_ratio.items():
            tests[ratio] = _result(pair, n_tests, ("worse", "better"))
        tested.append(
            dataclasses.replace(scheme, learned_test=learned_test, tests=tests)
        )

    def most_accurate_first(scheme: TaskScheme) -> tuple[bool, float, float, str]:
        beyond = scheme.accuracy_beyond
        at_one = scheme.shares[1.0].median
        return (
            not scheme.ranked,
            math.inf if math.isnan(beyond) else -beyond,
            math.inf if math.isnan(at_one) else -at_one,
            scheme.label,
        )

    tested.sort(key=most_accurate_first)
    remarks = []
    if reference and asked != base:
        remarks.append(
            f"{asked} has no tested run: the others are compared with {base}."
        )
    return TaskComparison(
        reference=base, remarks=remarks, n_tests=n_tests, schemes=tested
    )


def _scheme(rows: pd.DataFrame, places: pd.DataFrame) -> TaskScheme:
    """Return what a scheme has without a reference."""
    from scipy import stats

    runs = rows.drop_duplicates("folder")
    learned = int(runs["seed_learned"].sum())
    share = stats.binomtest(learned, len(runs)).proportion_ci(method="exact")
    steps = runs["steps_to_gate"].fillna(math.inf)
    ranked = learned >= ENOUGH_LEARNED * len(runs)

    shares = {}
    for place in places.to_dict("records"):
        shares[float(place["length_ratio"])] = Share(
            place["accuracy"],
            place["accuracy_min"],
            place["accuracy_max"],
            place["status"],
            place["trivial"],
        )
    # Schemes are ordered by it: a place without a number counts as 0.
    beyond = places.loc[places["length_ratio"] > 1, "accuracy"].fillna(0)
    return TaskScheme(
        label=runs["label"].iloc[0],
        encoding=runs["encoding"].iloc[0],
        seeds=len(runs),
        learned=learned,
        learned_low=float(share.low),
        learned_high=float(share.high),
        ranked=ranked,
        steps_to_gate=float(steps.median()),
        shares=shares,
        accuracy_beyond=beyond.mean() if ranked else math.nan,
    )


def _pairs(
    scheme: pd.DataFrame, base: pd.DataFrame
) -> tuple[list[Pair], dict[float, Pair]]:
    """Return the shares of a scheme and of the reference for each test that may be
    made: at most one of learning, and accuracies by length.

    Accuracies are compared if most seeds of both have learned, and all were tested
    alike.
    """
    scheme_learned = _seeds_learned(scheme)
    base_learned = _seeds_learned(base)
    if min(len(scheme_learned), len(base_learned)) < ENOUGH_SEEDS:
        return [], {}

    of_learned = [(scheme_learned, base_learned)]
    by_ratio: dict[float, Pair] = {}
    if min(scheme_learned.mean(), base_learned.mean()) < ENOUGH_LEARNED:
        return of_learned, by_ratio
    n_runs = len(scheme_learned) + len(base_learned)
    for ratio in RATIOS:
        of_scheme = _tested_at(scheme, ratio)
        of_base = _tested_at(base, ratio)
        both = pd.concat([of_scheme, of_base])
        is_measured = (both["status"] == "ok").sum() == n_runs
        is_alike = (both[["targets_sha256", "dtype"]].nunique() <= 1).all()
        if is_measured and is_alike:
            by_ratio[ratio] = (of_scheme["accuracy"], of_base["accuracy"])
    return of_learned, by_ratio


def _seeds_learned(rows: pd.DataFrame) -> pd.Series:
    """Return for each seed whether it learned, as 0 or 1."""
    return rows.drop_duplicates("folder")["seed_learned"].astype(float)


def _tested_at(rows: pd.DataFrame, ratio: float) -> pd.DataFrame:
    return rows[rows["as_trained"] & (rows["length_ratio"] == ratio)]


def _result(shares: Pair, n_tests: int, words: tuple[str, str]) -> ExactTest:
    """Return an exact test, adjusted for so many tests; `words`: for fewer and more.

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
    p = min(1.0, n_tests * float(test.pvalue))
    difference = float(test.statistic)

    word = words[1] if difference > 0 else words[0]
    if p >= ALPHA or abs(difference) < LEAST:
        word = NOT_RESOLVED
    return ExactTest(p, difference, word)
