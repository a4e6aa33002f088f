"""Schemes on a task: seeds that learned it, accuracy by length of the problems, and
exact tests against a reference.

A run has learned if it reaches the gate at every trained length. Medians, ranges and
tests are over all seeds, learned or not: to keep only those that learned would select
by the outcome. A seed that diverged has no answer right.
"""

import math
from collections.abc import Iterator
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
LEAST = 0.01  # a smaller difference of shares has no word
MOST_ORDERS = 200_000  # orders of seeds to enumerate; ten against ten have 184,756
_PLACE = ["of_task", "variant", "offset", "length_ratio"]


def as_trained(rows: pd.DataFrame) -> pd.Series:
    """Return which rows have the task, the positions and the model of the training, at
    any length.
    """
    variation = rows["task"].astype(str).str.contains(":")
    return (
        (rows["protocol"] == "problems")
        & ~variation
        & (rows["offset"].fillna(0) == 0)
        & (rows["variant"] == PLAIN)
    )


def task_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the newest rows on problems, each seed once, of runs for which it is known
    whether they learned.

    `of_task` is the option that a test varies, such as depth=0.5. A run that diverged
    has no answer right anywhere.
    """
    once = frame[~frame["repeated"]]
    rows = once[
        (once["protocol"] == "problems")
        & once["newest"]
        & (once["run_status"] == "done")
    ]
    rows = rows.assign(
        of_task=[task.partition(":")[2] for task in rows["task"]],
        offset=rows["offset"].fillna(0),
        as_trained=as_trained(rows),
        steps_to_gate=rows["steps_to_gate"].astype("float64"),
        **{
            name: rows[name].where(rows["status"] == "ok")
            for name in ("accuracy", "exact_match")
        },
    )
    trained = rows[rows["as_trained"] & (rows["length_ratio"] <= 1)]
    rows["seed_learned"] = ~rows["folder"].isin(
        trained.loc[~(trained["accuracy"] >= GATE), "folder"]
    )
    rows = rows[
        rows["folder"].isin(trained.loc[trained["length_ratio"] == 1, "folder"])
    ]
    places, diverged = (
        rows.drop_duplicates(_PLACE),
        once[once["run_status"] == "diverged"].drop_duplicates("folder"),
    )
    zeros = {
        "accuracy": 0.0,
        "exact_match": 0.0,
        "seed_learned": False,
        "status": "ok",
        "steps_to_gate": math.nan,
    }
    facts = diverged[["folder", "label", "encoding", "seed"]].to_dict("records")
    return pd.concat(
        [rows, *(places.assign(**run, **zeros) for run in facts)], ignore_index=True
    )


def accuracies(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a row per scheme of one setting and place where it was tested: variation,
    variant, offset, length ratio.

    `accuracy` (of tokens) is the median over all seeds, NaN unless `status` is ok.
    """
    places = []
    for (label, *place), group in task_rows(frame).groupby(["label", *_PLACE]):
        status = next((status for status in group["status"] if status != "ok"), "ok")
        shares = group["accuracy"] if status == "ok" else group["accuracy"] * math.nan
        row = {
            "label": label,
            **dict(zip(_PLACE, place, strict=True)),
            "status": status,
            "seeds": len(group),
        }
        row |= {name: group[name].iloc[0] for name in ("as_trained", "trivial")}
        places.append(
            row
            | {
                "accuracy": shares.median(),
                "accuracy_min": shares.min(),
                "accuracy_max": shares.max(),
            }
        )
    return pd.DataFrame(places)


def compare_tasks(frame: pd.DataFrame, reference: str | None = None) -> pd.DataFrame:
    """Compare the schemes of one setting on a task. The default reference is `rope`,
    else `none`, else the first one.

    Returns:
        A row per scheme: the most accurate beyond trained lengths first, schemes that
        have not learned last. `seeds`; `learned` (how many did), with the 95 % interval
        of the share by Clopper & Pearson (1934); `ranked` (at least half learned);
        `steps_to_gate` (median); `accuracy_1x` ... as in `accuracies`. Exact tests
        against the reference permute the seeds: `learned_p`, `accuracy_2x_p`,
        `accuracy_4x_p`, adjusted by Bonferroni for all tests of the table, each with a
        `_difference`, a `_word`, and `_why` there is none. `attrs`: `reference`,
        `tests`.
    """
    rows, places = task_rows(frame), accuracies(frame)
    if not len(rows):
        return pd.DataFrame()
    choices = (reference_label(frame, reference), "none", rows["label"].min())
    base = next(label for label in choices if label in set(rows["label"]))
    of_base, schemes, tests = rows[rows["label"] == base], [], []
    for label, group in rows.groupby("label"):
        schemes.append(
            _scheme(group, places[(places["label"] == label) & places["as_trained"]])
        )
        tests += [
            (schemes[-1], *test)
            for test in (_comparisons(group, of_base) if label != base else [])
        ]
    number = sum(not why for _, _, why, _ in tests)
    for row, name, why, shares in tests:
        row |= (
            {f"{name}_word": "", f"{name}_why": why}
            if why
            else _test_columns(row, name, shares, number)
        )
    table = pd.DataFrame(sorted(schemes, key=lambda row: row.pop("order")))
    table.attrs = {"reference": base, "tests": number}
    return table


def _scheme(rows: pd.DataFrame, places: pd.DataFrame) -> dict[str, Any]:
    """Return a scheme's columns, with `order` to sort by."""
    from scipy import stats

    runs = rows.drop_duplicates("folder")
    learned, ranked = (
        int(runs["seed_learned"].sum()),
        bool(runs["seed_learned"].mean() >= HALF),
    )
    share = stats.binomtest(learned, len(runs)).proportion_ci(method="exact")
    row: dict[str, Any] = {
        "label": runs["label"].iloc[0],
        "encoding": runs["encoding"].iloc[0],
        "seeds": len(runs),
    }
    row |= {
        "learned": learned,
        "learned_low": float(share.low),
        "learned_high": float(share.high),
        "ranked": ranked,
    }
    row["steps_to_gate"] = float(np.median(runs["steps_to_gate"].fillna(math.inf)))
    for place in places.to_dict("records"):
        name = f"accuracy_{place['length_ratio']:.3g}x"
        row |= {f"{name}{end}": place[f"accuracy{end}"] for end in ("", "_min", "_max")}
        row |= {f"{name}_{fact}": place[fact] for fact in ("status", "trivial")}
    beyond = places.loc[places["length_ratio"] > 1, "accuracy"].fillna(0).mean()
    order = (
        not ranked,
        -np.nan_to_num(beyond) * ranked,
        -np.nan_to_num(row["accuracy_1x"]),
        row["label"],
    )
    return row | {"order": order}


def _comparisons(
    scheme: pd.DataFrame, base: pd.DataFrame
) -> Iterator[tuple[str, str, list[pd.Series]]]:
    """Yield the tests of a scheme against the reference: the column, why it is not
    tested, and the shares of both.
    """
    learned = [
        rows.drop_duplicates("folder")["seed_learned"].astype(float)
        for rows in (scheme, base)
    ]
    seeds = min(map(len, learned))
    too_few = f"{seeds} of {ENOUGH_SEEDS} seeds" if seeds < ENOUGH_SEEDS else ""
    gate = "not learned" if learned[0].mean() < HALF else ""
    gate = gate or ("the reference has not learned" if learned[1].mean() < HALF else "")
    yield "learned", too_few, learned
    for ratio in RATIOS:
        tested = [
            rows[rows["as_trained"] & (rows["length_ratio"] == ratio)]
            for rows in (scheme, base)
        ]
        pooled = pd.concat(tested)
        failures = pooled.loc[pooled["status"] != "ok", "status"].str.replace("_", " ")
        differ = (pooled[["targets_sha256", "dtype"]].nunique() > 1).any()
        missing = (
            ""
            if [*map(len, tested)] == [*map(len, learned)]
            else "not tested in all seeds"
        )
        reason = (
            too_few
            or gate
            or "".join(failures[:1])
            or ("other problems or precision" if differ else missing)
        )
        yield f"accuracy_{ratio:g}x", reason, [rows["accuracy"] for rows in tested]


def _test_columns(
    row: dict[str, Any], name: str, shares: list[pd.Series], tests: int
) -> dict[str, Any]:
    """Return the exact test of two sets of unpaired seeds as columns of this name,
    adjusted for `tests` tests.
    """
    from scipy import stats

    test = stats.permutation_test(
        [seeds.to_numpy() for seeds in shares],
        lambda a, b, axis: np.mean(a, axis=axis) - np.mean(b, axis=axis),
        permutation_type="independent",
        vectorized=True,
        n_resamples=MOST_ORDERS,
        batch=10_000,
        rng=np.random.default_rng(0),
    )
    p, reason = min(1.0, tests * float(test.pvalue)), ""
    words = (
        ("learned by fewer seeds", "learned by more seeds")
        if name == "learned"
        else ("worse", "better")
    )
    word = words[int(test.statistic > 0)]
    if (
        tests
        * max(2 / math.comb(sum(map(len, shares)), len(shares[0])), 2 / MOST_ORDERS)
        >= ALPHA
    ):
        word, reason = "", "too few seeds for any outcome"
    elif p >= ALPHA or abs(test.statistic) < LEAST:
        word = NOT_RESOLVED
    elif row.get(name, math.nan) <= row.get(f"{name}_trivial", math.nan):
        reason = "no better than the trivial reader"
    columns = {"p": p, "difference": float(test.statistic), "word": word, "why": reason}
    return {f"{name}_{key}": value for key, value in columns.items()}
