"""Schemes on a task: seeds that learned it, accuracy by length of the problems, and exact tests against a reference.

A run has learned if it reaches the gate at every trained length. Medians, ranges and tests are over all seeds, learned
or not: to keep only those that learned would select by the outcome. A seed that diverged has no answer right.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from posbench.results.compare import ALPHA, ENOUGH_SEEDS, HALF, NOT_RESOLVED, reference_label
from posbench.results.frame import GATE
from posbench.run_folder.rows import PLAIN

RATIOS = (2.0, 4.0)  # times the longest trained problems, where accuracies are tested
LEAST = 0.01  # of a share: a smaller difference has no word
MOST_ORDERS = 200_000  # orders of seeds to enumerate; ten against ten have 184,756
_PLACE = ["of_task", "variant", "offset", "length_ratio"]


def task_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the newest rows on problems of runs of which it is known whether they learned, each seed once.

    Beside the columns of the frame: `of_task` (what a test varies of the task, such as depth=0.5), `as_trained`,
    `seed_learned`. A run that diverged has a copy, with no answer right, of each row that another run has.
    """
    rows = frame[~frame["repeated"] & (frame["protocol"] == "problems") & frame["newest"]].copy()
    rows["of_task"] = rows["task"].astype(str).str.partition(":")[2]
    rows["offset"], rows["steps_to_gate"] = rows["offset"].fillna(0), rows["steps_to_gate"].astype("float64")
    rows["as_trained"] = (rows["of_task"] == "") & (rows["offset"] == 0) & (rows["variant"] == PLAIN)
    rows.loc[rows["status"] != "ok", ["accuracy", "exact_match"]] = math.nan
    trained = rows[rows["as_trained"] & (rows["length_ratio"] <= 1) & (rows["run_status"] == "done")]
    known = trained.loc[trained["length_ratio"] == 1, "folder"]
    rows["seed_learned"] = ~rows["folder"].isin(trained.loc[~(trained["accuracy"] >= GATE), "folder"])
    rows = rows[rows["folder"].isin(known)]
    diverged = frame[~frame["repeated"] & (frame["run_status"] == "diverged")].drop_duplicates("folder")
    wrong = {"accuracy": 0.0, "exact_match": 0.0, "seed_learned": False, "status": "ok", "steps_to_gate": math.nan}
    places = rows.drop_duplicates(_PLACE)
    copies = [places.assign(**{name: run[name] for name in ("folder", "label", "encoding", "seed")}, **wrong)
              for run in diverged.to_dict("records")]  # fmt: skip
    return pd.concat([rows, *copies], ignore_index=True)


def accuracies(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a row per scheme of one setting and place where it was tested.

    A place is `of_task`, `variant` (plain, an extension ...), `offset` of the positions, and `length_ratio` (problem
    length / longest trained one). `status`, `seeds`, `problem_length`; `accuracy` (of tokens) and `exact_match` (of
    problems), medians over all seeds with `_min` and `_max`; `accuracy_of_learned` over the seeds that learned;
    `chance` and `trivial`, accuracies of guessing and of the task's trivial reader. Shares from 0 to 1.
    """
    places = []
    for (label, *place), same in task_rows(frame).groupby(["label", *_PLACE]):
        bad = same.loc[same["status"] != "ok", "status"]
        row = {"label": label, **dict(zip(_PLACE, place, strict=True)), "seeds": len(same)}
        row |= {name: same[name].iloc[0] for name in ("as_trained", "problem_length", "chance", "trivial")}
        row["status"] = bad.iloc[0] if len(bad) else "ok"
        for name in ("accuracy", "exact_match"):
            shares = same[name] * (math.nan if len(bad) else 1)
            row |= {name: shares.median(), f"{name}_min": shares.min(), f"{name}_max": shares.max()}
            row[f"{name}_of_learned"] = shares[same["seed_learned"]].median()
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
        the table; each with its `_difference`, its `_word`, and `_why` there is none. `attrs`: `reference`, `tests`.
    """
    from scipy import stats

    rows, places = task_rows(frame), accuracies(frame)
    if not len(rows):
        return pd.DataFrame()
    labels = set(rows["label"])
    wanted = (reference_label(frame, reference), reference_label(frame, "none"), min(labels))
    base = next(label for label in wanted if label in labels)
    schemes, tests = [], {}
    for label, same in rows.groupby("label"):
        runs = same.drop_duplicates("folder")
        seeds, learned, steps = len(runs), int(runs["seed_learned"].sum()), runs["steps_to_gate"].fillna(math.inf)
        share = stats.binomtest(learned, seeds).proportion_ci(method="exact")
        row: dict[str, Any] = {"label": label, "encoding": runs["encoding"].iloc[0], "seeds": seeds, "learned": learned}
        row |= {"learned_low": float(share.low), "learned_high": float(share.high), "ranked": 2 * learned >= seeds}
        row["steps_to_gate"] = float(np.median(steps))
        beyond = []
        for place in places[(places["label"] == label) & places["as_trained"]].to_dict("records"):
            name = f"accuracy_{place['length_ratio']:.3g}x"
            row |= {name: place["accuracy"], f"{name}_status": place["status"]}
            row |= {f"{name}_{end}": place[f"accuracy_{end}"] for end in ("min", "max")}
            beyond += [np.nan_to_num(place["accuracy"])] if place["length_ratio"] > 1 else []
        row["_order"] = not row["ranked"], -float(np.mean(beyond or [0])) * row["ranked"], -row["accuracy_1x"], label
        tests[label] = _tests(same, rows[rows["label"] == base]) if label != base else {}
        schemes.append(row)
    number = sum(isinstance(test, _Test) for each in tests.values() for test in each.values())
    for row in schemes:
        for name, test in tests[row["label"]].items():
            row |= test.columns(name, number) if isinstance(test, _Test) else {f"{name}_word": "", f"{name}_why": test}
    table = pd.DataFrame(sorted(schemes, key=lambda row: row["_order"])).drop(columns="_order")
    table.attrs = {"reference": base, "tests": number}
    return table


class _Test(NamedTuple):
    """An exact test over permutations of seeds that two schemes have equal means."""

    difference: float  # of means
    p: float  # two-sided
    least: float  # the smallest p that so many seeds can give
    more: str  # the word where the first has more
    less: str
    remark: str = ""

    def columns(self, name: str, tests: int) -> dict[str, Any]:
        """Return its columns, p adjusted for so many tests."""
        p, small = min(1.0, tests * self.p), tests * self.least >= ALPHA
        resolved = p < ALPHA and abs(self.difference) >= LEAST
        said = NOT_RESOLVED if not resolved else self.more if self.difference > 0 else self.less
        why = "too few seeds for any outcome" if small else self.remark if said == self.more else ""
        return {
            f"{name}_difference": self.difference,
            f"{name}_p": p,
            f"{name}_word": "" if small else said,
            f"{name}_why": why,
        }


def _tests(own: pd.DataFrame, base: pd.DataFrame) -> dict[str, _Test | str]:
    """Return the tests of a scheme against the reference by name, or why there is none."""
    pair = [rows.drop_duplicates("folder")["seed_learned"].astype("float64") for rows in (own, base)]
    names = ["learned", *(f"accuracy_{ratio:g}x" for ratio in RATIOS)]
    if (seeds := min(map(len, pair))) < ENOUGH_SEEDS:
        return dict.fromkeys(names, f"{seeds} of {ENOUGH_SEEDS} seeds")
    tests: dict[str, _Test | str] = {"learned": _permuted(pair, "learned by more seeds", "learned by fewer seeds")}
    for name, ratio in zip(names[1:], RATIOS, strict=True):
        at = [rows[rows["as_trained"] & (rows["length_ratio"] == ratio)] for rows in (own, base)]
        both = pd.concat(at)
        bad = both.loc[both["status"] != "ok", "status"]
        if pair[0].mean() < HALF or pair[1].mean() < HALF:
            tests[name] = "not learned" if pair[0].mean() < HALF else "the reference has not learned"
        elif len(bad):
            tests[name] = str(bad.iloc[0]).replace("_", " ")
        elif list(map(len, at)) != list(map(len, pair)):
            tests[name] = "not tested in all seeds"
        elif both["targets_sha256"].nunique() > 1 or both["dtype"].nunique() > 1:
            tests[name] = "other problems or precision"
        else:
            beaten = at[0]["accuracy"].median() > at[0]["trivial"].min() or at[0]["trivial"].isna().all()
            remark = "" if beaten else "not better than the trivial reader"
            tests[name] = _permuted([rows["accuracy"] for rows in at], "better", "worse", remark)
    return tests


def _permuted(pair: Sequence["pd.Series[float]"], more: str, less: str, remark: str = "") -> _Test:
    """Return the test of two schemes' seeds. They are not paired: were equal seeds correlated, it is conservative.

    It speaks of these test problems, which are the same for all.
    """
    from scipy import stats

    def difference(first: Any, second: Any, axis: int) -> Any:
        return np.mean(first, axis=axis) - np.mean(second, axis=axis)

    first, second = (shares.to_numpy(np.float64) for shares in pair)
    test = stats.permutation_test(
        (first, second), difference, permutation_type="independent", vectorized=True, n_resamples=MOST_ORDERS,
        batch=10_000, rng=np.random.default_rng(0),
    )  # fmt: skip
    least = max(2 / math.comb(len(first) + len(second), len(first)), 2 / MOST_ORDERS)
    return _Test(float(test.statistic), float(test.pvalue), least, more, less, remark)
