"""What runs say of claims (supported, contradicted, open, not learned, not run) and of
published numbers (reproduced).

A claim about text needs five seeds, one about a task ten: with five no outcome of a
task can be told from chance. Tests are adjusted by Bonferroni for all registered
claims, whichever were run. A number is reproduced if its whole interval is within the
margin, and not if the whole interval is outside. Nothing is said of schemes that have
not learned more than an n-gram model, of those not shown to use more than a quarter of
their training length, nor of longer problems where a scheme has not learned the trained
ones.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from posbench.claims.claim import Condition, Entry, LossTerm, MoreSeeds
from posbench.estimate import Estimate, estimate
from posbench.results import compare, tasks
from posbench.results.compare import ALPHA, ENOUGH_SEEDS, Losses
from posbench.terminal.console import plural

Runs = Mapping[str, pd.DataFrame]  # by name in the claim: rows of `results.frame.read`
Finding = dict[str, Any]
# columns of rows on problems, by the protocol of a published number
SHARES = {"problems": "accuracy", "exact": "exact_match"}


def judge(entries: Sequence[tuple[Entry, Runs]], n_registered: int) -> pd.DataFrame:
    """Judge claims, which are some of the registered ones.

    Returns:
        A row per claim, in their order: `claim`, `sentence`, `outcome`; `ours`, what
        was found, or why nothing was; `p`, two-sided and before adjustment, None where
        nothing was tested; `cpu_minutes` of training its runs; `published`, `paper` and
        the place in it, `where`; `predicted`.
    """
    judged = []
    for entry, runs in entries:
        claim = entry.claim
        source = claim.source
        ended = ["done"]
        if claim.more_seeds:
            ended.append("diverged")  # no answer is right
        done = {}
        seconds = 0.0
        for name, rows in runs.items():
            rows = rows[rows["run_status"].isin(ended)]
            of_each_run = rows.drop_duplicates("folder")
            seconds += float(of_each_run["cpu_seconds"].sum())
            # a claim names its runs itself, and they lie in one study
            done[name] = rows.assign(label=name, repeated=False)

        finding = {"p": None, **_finding(entry, done)}
        if finding["p"] is not None and n_registered * finding["p"] >= ALPHA:
            finding["outcome"] = "open"

        published = source.published or ""
        if entry.is_published:
            margin = f"within {entry.tests[0].within:g}"
            if claim.narrowed_from:
                margin += f", narrowed after the run from {claim.narrowed_from:g}"
            published += f" ({margin})"
        predicted = ""
        if claim.prediction:
            predicted = claim.prediction.outcome
        row = {
            "claim": entry.id,
            "sentence": claim.sentence,
            **finding,
            "cpu_minutes": round(seconds / 60, 1),
            "published": published,
            "paper": source.paper,
            "where": source.where,
            "predicted": predicted,
        }
        judged.append(row)
    return pd.DataFrame(judged)


def _finding(entry: Entry, runs: Runs) -> Finding:
    """Return the finding on a claim: its outcome before adjustment, with a p-value if
    something was tested.
    """
    n_seeds = {name: rows["seed"].nunique() for name, rows in runs.items()}
    name = min(sorted(n_seeds), key=n_seeds.__getitem__)
    fewest = n_seeds[name]
    few = ""  # what is missing, if there is anything
    if fewest < entry.seeds:
        few = f"{fewest} of {entry.seeds} seeds of {name}"
    # of a task's answers some are counted, though nothing is said of them
    counts = entry.claim.more_seeds is not None and fewest >= ENOUGH_SEEDS
    if few and not counts:
        return {"outcome": "not run", "ours": few}

    if entry.claim.more_seeds:
        return _task_finding(entry.claim.more_seeds, runs, few)
    if entry.is_published:
        return _reproduction(entry.tests[0], runs)
    return _text_finding(entry, runs)


def _text_finding(entry: Entry, runs: Runs) -> Finding:
    """Return the finding on sums of losses, by the seeds that all runs have."""
    from scipy import special

    shared = set.intersection(*(set(rows["seed"]) for rows in runs.values()))
    seeds = sorted(shared)[: entry.seeds]
    frame = pd.concat(runs.values())
    frame = frame[frame["seed"].isin(seeds)]
    losses = Losses.of(frame)
    trained = losses.train_length
    for name in runs:
        used = compare.uses(losses, name) or 0
        is_measured = 4 * min(losses.lengths(name), default=trained) <= trained
        reason = ""
        if compare.beats(losses, name, "ngram") != "yes":
            reason = "have learned more than an n-gram model"
        elif is_measured and 4 * used < trained:
            reason = f"use more than a quarter of its {trained} tokens"
        if reason:
            why = f"{name} is not shown to {reason}"
            return {"outcome": "not learned", "ours": why}
    try:
        means = [_mean(test, losses, frame) for test in entry.tests]
    except LookupError as missing:
        return {"outcome": "not run", "ours": missing.args[0]}

    ours = []
    supporting = []  # p-values
    contradicting = []
    for test, mean in zip(entry.tests, means, strict=True):
        ours.append(f"{mean.mean:+.3f} ({mean.low():+.3f} to {mean.high():+.3f})")
        excess = test.direction * (mean.mean - test.margin)
        # a two-sided t-test
        t = -abs(excess) / max(mean.error, 1e-12)
        p_value = 2 * float(special.stdtr(mean.df, t))
        if excess > 0:
            supporting.append(p_value)
        else:
            contradicting.append(p_value)
    if contradicting:
        # one test is enough, by a p-value adjusted for their number
        outcome = "contradicted"
        p_value = min(1.0, len(means) * min(contradicting))
    else:
        outcome = "supported"
        p_value = max(supporting)  # all tests must support
    return {"outcome": outcome, "p": p_value, "ours": " and ".join(ours)}


def _reproduction(published: Condition, runs: Runs) -> Finding:
    """Return our value of a published number, the mean over seeds of losses or shares
    of right answers, with its 95 % interval.
    """
    (term,) = published.terms
    values = _value(term, runs[term.run])
    if values.empty or values.isna().any():
        missing = f"{term.run} has no value at {term.ratio:g}x ({term.kind})"
        return {"outcome": "not run", "ours": missing}

    least = published.margin - published.within
    most = published.margin + published.within

    mean = values.mean()
    over = plural(len(values), "seed")
    n_answers = 0  # of a share: those behind its interval
    if term.protocol in SHARES:
        if len(values) == 1:
            (n_answers,) = _rows_of(term, runs[term.run])["n_blocks"]
            over += f", {n_answers} problems"
        elif mean in (0, 1):  # equal seeds have no spread
            n_answers = len(values)
    if n_answers:
        low, high = share_bounds(mean, n_answers)
    else:
        over_seeds = estimate(values.to_numpy()[:, None], np.ones(1))
        low = over_seeds.low()  # nan with one seed
        high = over_seeds.high()

    outcome = "open"
    if least <= low and high <= most:
        outcome = "reproduced"
    if high < least or most < low:
        outcome = "not reproduced"
    if outcome == "open" and n_answers:
        narrowest = share_bounds(published.margin, n_answers)
        if narrowest[0] < least or most < narrowest[1]:
            over += ": too few for the margin"
    return {
        "outcome": outcome,
        "ours": f"{mean:.3f} ({low:.3f} to {high:.3f}, {over})",
    }


def share_bounds(share: float, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of right answers over problems, or of seeds
    that are all right or all wrong (Wilson, 1927). The answers to one problem count as
    one.
    """
    from scipy import stats

    n_right = round(share * n)
    bounds = stats.binomtest(n_right, n).proportion_ci(method="wilson")
    return bounds.low, bounds.high


def _value(term: LossTerm, rows: pd.DataFrame) -> Any:
    """Return the loss, or the share of right answers, of a run by seed."""
    column = SHARES.get(term.protocol, "nll")
    return _rows_of(term, rows).set_index("seed")[column]


def _rows_of(term: LossTerm, rows: pd.DataFrame) -> pd.DataFrame:
    """Return a run's row for each seed."""
    if term.protocol in SHARES:
        rows = tasks.task_rows(rows)
        rows = rows[(rows["variant"] == "plain") & (rows["offset"] == 0)]
        kind = rows["of_task"].replace("", "plain")
    else:
        rows = compare.main_rows(rows, term.protocol)
        kind = rows["variant"]
    return rows[(kind == term.kind) & (rows["length_ratio"] == term.ratio)]


def _mean(test: Condition, losses: Losses, frame: pd.DataFrame) -> Estimate:
    """Return the mean of a sum of losses, paired by seed and document; LookupError if
    one is missing.

    Protocols other than fixed_target may score other tokens at each length: their
    losses are paired by seed alone.
    """
    by_document = all(term.protocol == "fixed_target" for term in test.terms)
    total: Any = None
    for term in test.terms:
        # nats of the run: (seeds, units of text), or of all text (seeds, 1)
        length = round(term.ratio * losses.train_length)
        if term.protocol == "fixed_target":
            level = losses.level(term.run, length, term.kind)
        else:
            nll = _value(term, frame[frame["label"] == term.run])
            level = nll.to_frame(0) * losses.tokens.sum()
        if level.empty or level.isna().any(axis=None):
            kind = f"{term.protocol}, {term.kind}"
            raise LookupError(f"{term.run} has no loss at {length} tokens ({kind})")

        if not by_document:
            level = level.sum(axis=1).to_frame()
        if total is None:
            total = term.weight * level
        else:
            total = compare.difference(total, -term.weight * level)
    return losses.estimate(total)


def _task_finding(pair: MoreSeeds, runs: Runs, few: str) -> Finding:
    """Return how many seeds of each scheme answer right, with the p-value of Fisher's
    exact test.
    """
    from scipy import stats

    counts = []  # of each scheme, how many seeds answer right, and how many do not
    for name in (pair.of, pair.than):
        of_each_seed = tasks.task_rows(runs[name]).drop_duplicates("folder")
        learned = of_each_seed["seed_learned"]
        if pair.at > 1 and learned.mean() < tasks.ENOUGH_LEARNED:
            reason = f"{int(learned.sum())} of {len(learned)} seeds of {name} learned"
            return {"outcome": "not learned", "ours": reason}

        term = LossTerm(1, name, pair.at, "problems", pair.variant or "plain")
        accuracy = _value(term, runs[name])
        if accuracy.empty or accuracy.isna().any() or len(accuracy) < len(learned):
            missing = f"{name} was not tested at {pair.at:g}x"
            return {"outcome": "not run", "ours": missing}
        right = int((accuracy >= pair.right).sum())
        counts.append((right, len(accuracy) - right))

    first, second = counts
    ours = f"{first[0]} of {sum(first)} against {second[0]} of {sum(second)} seeds"
    if few:
        return {"outcome": "not run", "ours": f"{few}: {ours}"}
    outcome = "contradicted"
    if first[0] / sum(first) > second[0] / sum(second):
        outcome = "supported"
    p_value = float(stats.fisher_exact(counts).pvalue)
    return {"outcome": outcome, "p": p_value, "ours": ours}
