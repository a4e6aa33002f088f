"""Schemes on a task: seeds that learned it, accuracy by length of the problems, and exact tests against a reference.

A run has learned if it reaches the gate at every trained length. Medians, ranges and tests are over all seeds, learned
or not: to keep only those that learned would select by the outcome. A seed that diverged has no answer right.
"""

import math
from typing import Any

import numpy as np
import pandas as pd

from posbench.results.compare import ALPHA, ENOUGH_SEEDS, HALF, NOT_RESOLVED, reference_label
from posbench.results.frame import GATE
from posbench.run.rows import PLAIN

RATIOS = (2.0, 4.0)  # times the longest trained problems, where accuracies are tested
LEAST = 0.01  # of a share: a smaller difference has no word
MOST_ORDERS = 200_000  # orders of seeds to enumerate; ten against ten have 184,756
_PLACE = ["of_task", "variant", "offset", "length_ratio"]


def as_trained(rows: pd.DataFrame) -> pd.Series:
    """Tell which rows are of a task, its positions and the model as they were in training, at any length."""
    variation = rows["task"].astype(str).str.contains(":")
    return (rows["protocol"] == "problems") & ~variation & (rows["offset"].fillna(0) == 0) & (rows["variant"] == PLAIN)


def task_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the newest rows on problems of runs of which it is known whether they learned, each seed once.

    Beside the columns of the frame: `of_task` (what a test varies of the task, such as depth=0.5), `as_trained`,
    `seed_learned`. A run that diverged has a copy, with no answer right, of each row that another run has.
    """
    once = frame[~frame["repeated"]]
    rows = once[(once["protocol"] == "problems") & once["newest"] & (once["run_status"] == "done")]
    measured = rows["status"] == "ok"
    rows = rows.assign(
        of_task=[task.partition(":")[2] for task in rows["task"]],
        offset=rows["offset"].fillna(0),
        as_trained=as_trained(rows),
        steps_to_gate=rows["steps_to_gate"].astype("float64"),
        **{name: rows[name].where(measured) for name in ("accuracy", "exact_match")},
    )
    trained = rows[rows["as_trained"] & (rows["length_ratio"] <= 1)]
    rows["seed_learned"] = ~rows["folder"].isin(trained.loc[~(trained["accuracy"] >= GATE), "folder"])
    rows = rows[rows["folder"].isin(trained.loc[trained["length_ratio"] == 1, "folder"])]
    places, diverged = rows.drop_duplicates(_PLACE), once[once["run_status"] == "diverged"].drop_duplicates("folder")
    wrong = {"accuracy": 0.0, "exact_match": 0.0, "seed_learned": False, "status": "ok", "steps_to_gate": math.nan}
    facts = diverged[["folder", "label", "encoding", "seed"]].to_dict("records")
    return pd.concat([rows, *(places.assign(**run, **wrong) for run in facts)], ignore_index=True)


def accuracies(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a row per scheme of one setting and place where it was tested.

    A place is `of_task`, `variant` (plain, an extension ...), `offset` of the positions, and `length_ratio` (problem
    length / longest trained one). `status`, `seeds`; `accuracy` (of tokens), the median over all seeds with `_min` and
    `_max`; `trivial`, that of the task's trivial reader. Shares from 0 to 1.
    """
    places = []
    for (label, *place), same in task_rows(frame).groupby(["label", *_PLACE]):
        status = next((status for status in same["status"] if status != "ok"), "ok")
        row = {"label": label, **dict(zip(_PLACE, place, strict=True)), "status": status, "seeds": len(same)}
        row |= {name: same[name].iloc[0] for name in ("as_trained", "trivial")}
        shares = same["accuracy"] if status == "ok" else same["accuracy"] * math.nan
        row |= {"accuracy": shares.median(), "accuracy_min": shares.min(), "accuracy_max": shares.max()}
        places.append(row)
    return pd.DataFrame(places)


def compare_tasks(frame: pd.DataFrame, reference: str | None = None) -> pd.DataFrame:
    """Compare the schemes of one setting on a task.

    Args:
        frame: rows of `results.frame.read`, of one setting.
        reference: a label or an encoding; None: as for text, else `none`, else the first.

    Returns:
        A row per scheme, the most accurate beyond trained lengths first, what has not learned last. `label`,
        `encoding`, `seeds` (whose outcome is known), `learned` (how many did) with `learned_low` and `learned_high`
        (Clopper & Pearson, 1934, as shares), `ranked` (half of them or more), `steps_to_gate` (median; infinite where
        most never got there), and `accuracy_1x` ... as of `accuracies`. Against the reference, by exact tests over
        permutations of seeds: `learned_p`, `accuracy_2x_p`, `accuracy_4x_p`, adjusted by Bonferroni for all tests of
        the table; each with its `_difference`, its `_word`, and `_why` there is none, or what else is to be said.
        `attrs`: `reference`, `tests`.
    """
    rows, places = task_rows(frame), accuracies(frame)
    if not len(rows):
        return pd.DataFrame()
    wanted = (reference_label(frame, reference), reference_label(frame, "none"), rows["label"].min())
    base = next(label for label in wanted if label in set(rows["label"]))
    of_base, schemes = rows[rows["label"] == base], []
    for label, same in rows.groupby("label"):
        scheme = _scheme(same, places[(places["label"] == label) & places["as_trained"]])
        schemes.append(scheme | (_tests(same, of_base) if label != base else {}))
    tested = [(row, name[:-2]) for row in schemes for name in row if name.endswith("_p")]
    for row, name in tested:
        row[f"{name}_p"] = min(1.0, len(tested) * row[f"{name}_p"])
        if len(tested) * row.pop(f"{name}_least") >= ALPHA:
            row |= {f"{name}_word": "", f"{name}_why": "too few seeds for any outcome"}
        elif row[f"{name}_p"] >= ALPHA or abs(row[f"{name}_difference"]) < LEAST:
            row[f"{name}_word"] = NOT_RESOLVED
        elif row.get(name, math.nan) <= row.get(f"{name}_trivial", math.nan):
            row[f"{name}_why"] = "no better than the trivial reader"
    table = pd.DataFrame(sorted(schemes, key=lambda row: row.pop("order")))
    table.attrs = {"reference": base, "tests": len(tested)}
    return table


def _scheme(rows: pd.DataFrame, places: pd.DataFrame) -> dict[str, Any]:
    """Return a scheme's columns, with `order` to sort by."""
    from scipy import stats

    runs = rows.drop_duplicates("folder")
    learned, ranked = int(runs["seed_learned"].sum()), bool(runs["seed_learned"].mean() >= HALF)
    share = stats.binomtest(learned, len(runs)).proportion_ci(method="exact")
    row: dict[str, Any] = {
        "label": runs["label"].iloc[0], "encoding": runs["encoding"].iloc[0], "seeds": len(runs), "learned": learned,
        "learned_low": float(share.low), "learned_high": float(share.high), "ranked": ranked,
        "steps_to_gate": float(np.median(runs["steps_to_gate"].fillna(math.inf))),
    }  # fmt: skip
    for place in places.to_dict("records"):
        name = f"accuracy_{place['length_ratio']:.3g}x"
        row |= {f"{name}{end}": place[f"accuracy{end}"] for end in ("", "_min", "_max")}
        row |= {f"{name}_{fact}": place[fact] for fact in ("status", "trivial")}
    beyond = places.loc[places["length_ratio"] > 1, "accuracy"].fillna(0).mean()
    order = (not ranked, -np.nan_to_num(beyond) * ranked, -np.nan_to_num(row["accuracy_1x"]), row["label"])
    return row | {"order": order}


def _tests(scheme: pd.DataFrame, base: pd.DataFrame) -> dict[str, Any]:
    """Return the tests of a scheme against the reference, p not yet adjusted, or why there is none.

    Seeds are not paired: were equal seeds correlated, the tests are conservative. They speak of these test problems.
    `_least` is the smallest p that so many seeds can give.
    """
    runs = [rows.drop_duplicates("folder")["seed_learned"].astype(float) for rows in (scheme, base)]
    number, gate = min(map(len, runs)), ""
    few = f"{number} of {ENOUGH_SEEDS} seeds" if number < ENOUGH_SEEDS else ""
    if min(learned.mean() for learned in runs) < HALF:
        gate = "not learned" if runs[0].mean() < HALF else "the reference has not learned"
    row: dict[str, Any] = {"learned_word": "", "learned_why": few}
    row |= {} if few else _permuted("learned", runs, "learned by more seeds", "learned by fewer seeds")
    for ratio in RATIOS:
        at = [rows[rows["as_trained"] & (rows["length_ratio"] == ratio)] for rows in (scheme, base)]
        name, both = f"accuracy_{ratio:g}x", pd.concat(at)
        bad = both.loc[both["status"] != "ok", "status"].str.replace("_", " ")
        others = (both[["targets_sha256", "dtype"]].nunique() > 1).any()
        why = few or gate or "".join(bad[:1]) or ("other problems or precision" if others else "")
        why = why if why or [*map(len, at)] == [*map(len, runs)] else "not tested in all seeds"
        row |= {f"{name}_word": "", f"{name}_why": why}
        row |= {} if why else _permuted(name, [rows["accuracy"] for rows in at], "better", "worse")
    return row


def _permuted(name: str, shares: list[pd.Series], more: str, less: str) -> dict[str, Any]:
    """Return the exact test of two sets of seeds, as columns of this name."""
    from scipy import stats

    test = stats.permutation_test(
        [seeds.to_numpy() for seeds in shares], lambda a, b, axis: np.mean(a, axis=axis) - np.mean(b, axis=axis),
        permutation_type="independent", vectorized=True, n_resamples=MOST_ORDERS, batch=10_000,
        rng=np.random.default_rng(0),
    )  # fmt: skip
    return {
        f"{name}_p": float(test.pvalue),
        f"{name}_least": max(2 / math.comb(sum(map(len, shares)), len(shares[0])), 2 / MOST_ORDERS),
        f"{name}_difference": float(test.statistic),
        f"{name}_word": more if test.statistic > 0 else less,
    }
