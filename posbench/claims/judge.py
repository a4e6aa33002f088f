"""What runs say of claims (supported, contradicted, open, not learned, not run) and of
published numbers (reproduced).

A claim about text needs five seeds, one about a task ten: with five no outcome of a
task can be told from chance. Tests are adjusted by Bonferroni for the claims that are
judged together. Nothing is said of schemes that have not learned more than an n-gram
model, of those that read less than half of their training length, nor of longer
problems where a scheme has not learned the trained ones.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from posbench.claims.claim import Entry, Inequality, MoreSeeds
from posbench.results import compare, tasks
from posbench.results.compare import ALPHA, ENOUGH_SEEDS, HALF, Losses
from posbench.results.estimate import Estimate

Runs = Mapping[str, pd.DataFrame]  # by name in the claim: rows of `results.frame.read`


def judge(entries: Sequence[tuple[Entry, Runs]]) -> pd.DataFrame:
    """Judge claims that are asked for together.

    Returns:
        A row per claim, in their order: `claim`, `sentence`, `outcome`; `ours`, what
        was found, or why nothing was; `p`, two-sided and before adjustment, None where
        nothing was tested; `cpu_minutes` of training its runs; `published`, `paper` and
        the place in it, `where`; `predicted`.
    """
    rows = []
    for entry, runs in entries:
        # diverged: no answer is right
        statuses = ("done", "diverged") if entry.claim.more_seeds else ("done",)
        done = {
            name: rows[rows["run_status"].isin(statuses)] for name, rows in runs.items()
        }
        seconds = sum(
            float(rows.drop_duplicates("folder")["cpu_seconds"].sum())
            for rows in done.values()
        )
        row: dict[str, Any] = {
            "claim": entry.id,
            "sentence": entry.claim.sentence,
            "p": None,
            **_finding(entry, done),
        }
        row["cpu_minutes"] = round(seconds / 60, 1)
        row |= {
            name: getattr(entry.claim.source, name) or ""
            for name in ("published", "paper", "where")
        }
        row["published"] += (
            f" (within {row.pop('within'):g})" if "within" in row else ""
        )
        rows.append(
            row
            | {
                "predicted": (
                    entry.claim.prediction.outcome if entry.claim.prediction else ""
                )
            }
        )
    tested = [row for row in rows if row["p"] is not None]
    for row in tested:
        row["outcome"] = "open" if len(tested) * row["p"] >= ALPHA else row["outcome"]
    return pd.DataFrame(rows)


def _finding(entry: Entry, runs: Runs) -> dict[str, Any]:
    """Return the finding on a claim: its outcome before adjustment, with a p-value if
    something was tested.
    """
    from scipy import special

    fewest, name = min((rows["seed"].nunique(), name) for name, rows in runs.items())
    few = (
        f"{fewest} of {entry.seeds} seeds of {name}"
        if fewest < entry.seeds and any(map(len, runs.values()))
        else ""
    )
    if fewest < min(entry.seeds, ENOUGH_SEEDS):
        return {"outcome": "not run", "ours": few}
    if published := [test for test in entry.tests if test.within]:
        return _reproduction(published[0], runs)
    if entry.claim.more_seeds:
        return _task_finding(entry.claim.more_seeds, runs, few)
    shared = sorted(set.intersection(*(set(rows["seed"]) for rows in runs.values())))[
        : entry.seeds
    ]
    frame = pd.concat(
        [
            rows[rows["seed"].isin(shared)].assign(label=name)
            for name, rows in runs.items()
        ]
    )
    losses = Losses(compare.main_rows(frame.assign(repeated=False)))
    if reason := next((reason for name in runs if (reason := _gate(losses, name))), ""):
        return {"outcome": "not learned", "ours": reason}
    try:
        means = [(test, _mean(test, losses, frame)) for test in entry.tests]
    except LookupError as missing:
        return {"outcome": "not run", "ours": missing.args[0]}
    # by whether the mean is on the claimed side
    p_values: dict[bool, list[float]] = {True: [], False: []}
    for test, mean in means:
        excess = test.direction * (mean.mean - test.margin)
        # a two-sided t-test
        p_value = 2 * float(
            special.stdtr(mean.df, -abs(excess) / max(mean.error, 1e-12))
        )
        p_values[excess > 0].append(p_value)
    # all tests must support; one contradicts, by a p-value adjusted for their number
    against = p_values[False]
    return {
        "outcome": "contradicted" if against else "supported",
        "p": min(1.0, len(means) * min(against)) if against else max(p_values[True]),
        "ours": " and ".join(
            f"{mean.mean:+.3f} ({mean.low():+.3f} to {mean.high():+.3f})"
            for _, mean in means
        ),
    }


def _reproduction(published: Inequality, runs: Runs) -> dict[str, Any]:
    """Return our value of a published number, the mean over seeds of losses or shares
    of right answers.
    """
    total: Any = 0
    for term in published.terms:
        rows = runs[term.run].assign(label=term.run, repeated=False)
        if column := {"problems": "accuracy", "exact": "exact_match"}.get(
            term.protocol
        ):
            rows = tasks.task_rows(rows).query("offset == 0 and variant == 'plain'")
            rows = rows.assign(
                variant=rows["of_task"].replace("", "plain"), nll=rows[column]
            )
        else:
            rows = compare.main_rows(rows, term.protocol)
        rows = rows[
            (rows["variant"] == term.kind) & (rows["length_ratio"] == term.ratio)
        ]
        total = total + term.weight * rows.set_index("seed")["nll"]
    if total.empty or total.isna().any():
        return {
            "outcome": "not run",
            "ours": f"{term.run} has no value at {term.ratio:g}x ({term.kind})",
        }
    outcome = (
        "reproduced"
        if abs(total.mean() - published.margin) <= published.within
        else "not reproduced"
    )
    seeds = (
        f"{total.min():.3f} to {total.max():.3f}, {len(total)} seeds"
        if len(total) > 1
        else "1 seed"
    )
    return {
        "outcome": outcome,
        "ours": f"{total.mean():.3f} ({seeds})",
        "within": published.within,
    }


def _gate(losses: Losses, name: str) -> str:
    """Return why nothing is said of a scheme; empty if it has learned and reads half of
    its training length.
    """
    if compare.beats(losses, name, "ngram") != "yes":
        return f"{name} is not shown to have learned more than an n-gram model"
    shorter = [
        length for length in losses.lengths(name) if length < losses.train_length
    ]
    span = compare.uses(losses, name) or min(shorter, default=losses.train_length)
    return (
        f"{name} needs only {span} of its {losses.train_length} tokens"
        if 2 * span < losses.train_length
        else ""
    )


def _mean(test: Inequality, losses: Losses, frame: pd.DataFrame) -> Estimate:
    """Return the mean of a sum of losses, paired by seed and document; LookupError if
    one is missing.

    Protocols other than fixed_target score other tokens at each length: their losses
    are paired by seed alone.
    """
    total, by_document = (
        None,
        all(term.protocol == "fixed_target" for term in test.terms),
    )
    for term in test.terms:
        length = round(term.ratio * losses.train_length)
        level = losses.level(term.run, length, term.kind)
        if term.protocol != "fixed_target":
            rows = compare.main_rows(
                frame.assign(repeated=False), term.protocol
            ).set_index("seed")
            rows = rows[
                (rows["label"] == term.run)
                & (rows["length"] == length)
                & (rows["variant"] == term.kind)
            ]
            level = rows[["nll"]].set_axis([0], axis=1) * losses.tokens.sum()
        if level.empty or level.isna().any(axis=None):
            raise LookupError(
                f"{term.run} has no loss at {length} tokens ({term.protocol},"
                f" {term.kind})"
            )
        level = level if by_document else level.sum(axis=1).to_frame()
        total = (
            term.weight * level
            if total is None
            else compare.difference(total, -term.weight * level)
        )
    return losses.estimate(total)


def _task_finding(pair: MoreSeeds, runs: Runs, few: str) -> dict[str, Any]:
    """Return how many seeds of each scheme answer right, with the p-value of Fisher's
    exact test.
    """
    from scipy import stats

    shares = []
    for name in (pair.of, pair.than):
        rows = tasks.task_rows(runs[name].assign(label=name, repeated=False))
        learned = rows.drop_duplicates("folder")["seed_learned"]
        if pair.at > 1 and learned.mean() < HALF:
            return {
                "outcome": "not learned",
                "ours": (
                    f"{int(learned.sum())} of {len(learned)} seeds of {name} learned"
                ),
            }
        plain = (rows["variant"] == "plain") & (rows["offset"] == 0)
        accuracy = rows.loc[
            plain
            & (rows["of_task"] == pair.variant)
            & (rows["length_ratio"] == pair.at),
            "accuracy",
        ]
        if accuracy.isna().any() or len(accuracy) < max(1, len(learned)):
            return {
                "outcome": "not run",
                "ours": f"{name} was not tested at {pair.at if len(learned) else 1:g}x",
            }
        shares.append((int((accuracy >= pair.right).sum()), len(accuracy)))
    (count, n), (other_count, other_n) = shares
    text = f"{count} of {n} against {other_count} of {other_n} seeds"
    if few:
        return {"outcome": "not run", "ours": f"{few}: {text}"}
    p_value = float(
        stats.fisher_exact(
            [[count, n - count], [other_count, other_n - other_count]]
        ).pvalue
    )
    return {
        "outcome": "supported" if count / n > other_count / other_n else "contradicted",
        "p": p_value,
        "ours": text,
    }
