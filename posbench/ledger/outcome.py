"""What runs say of a claim: supported, contradicted, open, not learned, or not testable here.

A figure is computed for every seed and judged by its interval over seeds and documents, against the claim's margin.
Holm's adjustment goes over the claims that were asked for together. A claim may be judged twice, with the first five
seeds and with all ten, so each time has half of the 5 %. Nothing is said of schemes that have not learned more than an
n-gram model, nor of those that read less than half of their training length.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from posbench.ledger.claim import Entry, Outcome, Term
from posbench.results import compare, tasks
from posbench.results.compare import Losses
from posbench.results.estimate import Estimate, estimate

LOOKS = (5, 10)  # seeds with which a claim is judged; other numbers of finished seeds are cut to these
ALPHA = 0.05 / len(LOOKS)
Runs = Mapping[str, pd.DataFrame]  # by name in the claim: rows of `results.frame.read`


@dataclasses.dataclass(frozen=True)
class Finding:
    """What was found of a claim."""

    entry: Entry
    outcome: Outcome
    why: str = ""  # it was not tested
    interval: Estimate | None = None  # of its figure, nats per token
    shares: tuple[tuple[int, int], tuple[int, int]] | None = None  # seeds that answer right, of all: more, than
    p: float | None = None  # two-sided, adjusted over the claims asked for
    minutes: float = 0.0  # CPU time of training the runs that it has, shared ones included


def judge(entries: Sequence[tuple[Entry, Runs]]) -> list[Finding]:
    """The findings of claims that were asked for together."""
    found = [dataclasses.replace(_tested(entry, runs), minutes=_minutes(runs)) for entry, runs in entries]
    tested = [place for place, one in enumerate(found) if one.p is not None]
    adjusted = holm([one.p for place in tested if (one := found[place]).p is not None])
    for place, p in zip(tested, adjusted, strict=True):
        one = found[place]
        outcome: Outcome = "open" if p >= ALPHA else "supported" if _as_claimed(one) else "contradicted"
        found[place] = dataclasses.replace(one, p=p, outcome=outcome)
    return found


def _as_claimed(one: Finding) -> bool:
    if one.shares is not None:
        (more, of), (than, of_than) = one.shares
        return more / of > than / of_than
    assert one.interval is not None
    return one.entry.direction * (one.interval.mean - one.entry.margin) > 0


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values so that the chance of any false rejection among them stays at the level tested.

    Source: Holm (1979), "A simple sequentially rejective multiple test procedure".
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    scaled = [min(1.0, (len(order) - rank) * p_values[i]) for rank, i in enumerate(order)]
    adjusted = [0.0] * len(order)
    for i, p in zip(order, itertools.accumulate(scaled, max), strict=True):
        adjusted[i] = p
    return adjusted


def p_value(mean: Estimate, expected: float) -> float:
    """Return the two-sided p of the t-test that a mean is `expected`."""
    from scipy import special

    if not mean.error:
        return float(mean.mean == expected)
    return float(2 * special.stdtr(mean.df, -abs(mean.mean - expected) / mean.error))


def _tested(entry: Entry, runs: Runs) -> Finding:
    """Return a claim with its p before adjustment, or why it has none."""
    done = {name: _done(runs[name]) for name in entry.runs}
    if few := [name for name, rows in done.items() if rows["seed"].nunique() < LOOKS[0]]:
        begun = any(map(len, done.values()))
        return Finding(entry, "not run", f"fewer than {LOOKS[0]} seeds of {', '.join(few)} are done" if begun else "")
    done = _at_a_look(done)
    if entry.claim.learned:
        return _of_task(entry, done)
    for name, rows in done.items():
        if why := _gate(name, rows):
            return Finding(entry, "not learned", why)
    mean = _mean(entry.terms, done)
    if isinstance(mean, str):
        return Finding(entry, "not testable here", mean)
    if len(mean.seeds) < LOOKS[0]:
        return Finding(entry, "not testable here", "its runs have too few seeds in common, or other target tokens")
    return Finding(entry, "open", interval=mean, p=p_value(mean, entry.margin))


def _done(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows["run_status"] == "done"]


def _minutes(runs: Runs) -> float:
    return sum(float(rows.drop_duplicates("folder")["cpu_seconds"].sum()) for rows in runs.values()) / 60


def _at_a_look(runs: Runs) -> dict[str, pd.DataFrame]:
    """Return the first seeds of each run, as many as the last look that all runs have reached.

    These are seeds that all runs have, if those are enough for a look: one failed run costs one seed.
    """
    shared = _in_all(set(rows["seed"]) for rows in runs.values())
    if len(shared) >= LOOKS[0]:
        runs = {name: rows[rows["seed"].isin(shared)] for name, rows in runs.items()}
    number = max(look for look in LOOKS if all(rows["seed"].nunique() >= look for rows in runs.values()))
    return {name: rows[rows["seed"].isin(sorted(set(rows["seed"]))[:number])] for name, rows in runs.items()}


def _in_all(sets: Iterable[set[int]]) -> set[int]:
    return set.intersection(*sets)


def _gate(name: str, rows: pd.DataFrame) -> str:
    """Return why nothing is said of a scheme; empty if it has learned and reads half of its training length."""
    losses = Losses(compare.main_rows(rows.assign(label=name, repeated=False)))
    if compare.learned(losses, name) != "yes":
        return f"{name} is not shown to have learned more than an n-gram model"
    length = losses.train_length
    shorter = [n for n in losses.lengths(name) if n < length]
    used = compare.uses(losses, name) or min(shorter, default=length)
    return f"{name} needs only {used} of its {length} tokens" if 2 * used < length else ""


def _mean(terms: Sequence[Term], runs: Runs) -> Estimate | str:
    """Return the mean of the figure over the seeds that all runs have, or a sentence on a loss that is missing.

    It is over seeds and documents where all losses are on the same targets, else over seeds.
    """
    figures, tokens = [], []
    for seed in sorted(_in_all(set(rows["seed"]) for rows in runs.values())):
        losses, targets = [], set()
        for term in terms:
            of_seed = runs[term.run][runs[term.run]["seed"] == seed]
            length = round(term.ratio * int(of_seed["train_length"].iloc[0]))
            alike = (of_seed["protocol"] == term.protocol) & (of_seed["variant"] == term.kind)
            rows = of_seed[alike & of_seed["newest"] & (of_seed["length"] == length) & of_seed["task"].isna()]
            status = rows["status"].iloc[0] if len(rows) else "not measured"
            if status != "ok":
                return f"{term.run} is {status} at {length} tokens ({term.protocol}, {term.kind})"
            losses.append((term.weight, rows.iloc[0]))
            targets.add((term.protocol, rows["targets_sha256"].iloc[0], rows["dtype"].iloc[0]))
        if len(targets) > len({protocol for protocol, *_ in targets}):
            continue
        first = losses[0][1]
        by_document = len(targets) == 1 and terms[0].protocol == "fixed_target"
        if by_document and all(row["unit_nll"] is not None for _, row in losses):
            figures.append(np.sum([weight * row["unit_nll"] for weight, row in losses], axis=0))
            tokens.append(np.asarray(first["unit_tokens"], dtype=np.float64))
        else:
            figures.append(np.array([sum(weight * row["nll"] for weight, row in losses)]))
            tokens.append(np.ones(1))
    if not figures:
        return Estimate(np.nan, np.nan, np.nan)
    if any(len(each) != len(tokens[0]) or (each != tokens[0]).any() for each in tokens):
        figures = [each.sum(keepdims=True) / of.sum() for each, of in zip(figures, tokens, strict=True)]
        tokens = [np.ones(1)]
    return estimate(np.stack(figures), tokens[0])


def _of_task(entry: Entry, runs: Runs) -> Finding:
    from scipy import stats

    asked = entry.claim.learned
    assert asked is not None
    shares = []
    for name in (asked.more, asked.than):
        rows = tasks.task_rows(runs[name].assign(label=name, repeated=False))
        right = rows.loc[rows["as_trained"] & (rows["length_ratio"] == asked.at), "accuracy"]
        if right.isna().any() or len(right) < runs[name]["seed"].nunique():
            return Finding(entry, "not testable here", f"{name} was not tested at {asked.at:g}x")
        shares.append((int((right >= asked.right).sum()), len(right)))
    pair = (shares[0], shares[1])
    if not shares[0][0] and not shares[1][0]:
        return Finding(entry, "not learned", f"no seed answers {asked.right:.0%} right at {asked.at:g}x", shares=pair)
    table = [[more, seeds - more] for more, seeds in pair]
    return Finding(entry, "open", shares=pair, p=float(stats.fisher_exact(table).pvalue))
