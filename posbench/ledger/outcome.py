"""What runs say of a claim: supported, contradicted, open, not learned, or not testable here.

A figure is computed for every seed and judged by its interval over seeds and documents, against the claim's margin.
Holm's adjustment goes over the claims that were asked for together. A claim may be judged twice, with the first five
seeds and with all ten, so each time has half of the 5 %. Nothing is said of schemes that have not learned more than an
n-gram model, nor of those that read less than half of their training length.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from posbench.evaluation import levels
from posbench.evaluation.intervals import Interval
from posbench.evaluation.levels import Contrast, weighted
from posbench.ledger.claim import Entry, Outcome, Term
from posbench.report.comparison import statistics, summary
from posbench.report.comparison.judgement import PerSeed, t_interval
from posbench.report.comparison.load import RunData, Scheme
from posbench.run_folder.jsonl import number
from posbench.run_folder.rows import PLAIN, EvaluationRow, newest_of_split

LOOKS = (5, 10)  # seeds with which a claim is judged; other numbers of finished seeds are cut to these
ALPHA = 0.05 / len(LOOKS)
Runs = Mapping[str, Sequence[RunData]]  # by name in the claim


@dataclasses.dataclass(frozen=True)
class Finding:
    """What was found of a claim."""

    entry: Entry
    outcome: Outcome
    why: str = ""  # it was not tested
    interval: Interval | None = None  # of its figure, nats per token
    shares: tuple[tuple[int, int], tuple[int, int]] | None = None  # seeds that answer right, of all: more, than
    p: float | None = None  # two-sided, adjusted over the claims asked for
    minutes: float = 0.0  # CPU time of training the runs that it has, shared ones included


def judge(entries: Sequence[tuple[Entry, Runs]]) -> list[Finding]:
    """The findings of claims that were asked for together."""
    found = [dataclasses.replace(_tested(entry, runs), minutes=_minutes(runs)) for entry, runs in entries]
    tested = [place for place, one in enumerate(found) if one.p is not None]
    adjusted = statistics.holm([one.p for place in tested if (one := found[place]).p is not None])
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


def _tested(entry: Entry, runs: Runs) -> Finding:
    """A claim with its p before adjustment, or why it has none."""
    done: Runs = {name: [run for run in runs.get(name, ()) if run.done] for name in entry.runs}
    if few := [name for name, each in done.items() if len(each) < LOOKS[0]]:
        begun = any(done.values())
        return Finding(entry, "not run", f"fewer than {LOOKS[0]} seeds of {', '.join(few)} are done" if begun else "")
    done = _at_a_look(done)
    if entry.claim.learned:
        return _of_task(entry, done)
    for name, each in done.items():
        if why := _gate(name, each):
            return Finding(entry, "not learned", why)
    values = _per_seed(entry.terms, done)
    if isinstance(values, str):
        return Finding(entry, "not testable here", values)
    found = t_interval(values) if len(values) >= LOOKS[0] else None
    if found is None:
        return Finding(entry, "not testable here", "its runs have too few seeds in common, or other target tokens")
    return Finding(entry, "open", interval=found, p=statistics.p_of(found, entry.margin))


def _minutes(runs: Runs) -> float:
    spent = (number(run.record.get("cpu_seconds")) for each in runs.values() for run in each)
    return sum(seconds for seconds in spent if seconds is not None) / 60


def _at_a_look(runs: Runs) -> dict[str, Sequence[RunData]]:
    """The first seeds of each run, as many as the last look that all runs have reached.

    These are seeds that all runs have, if those are enough for a look: one failed run costs one seed.
    """
    shared = statistics.in_all({run.seed for run in each} for each in runs.values())
    if len(shared) >= LOOKS[0]:
        runs = {name: [run for run in each if run.seed in shared] for name, each in runs.items()}
    seeds = max(look for look in LOOKS if all(len(each) >= look for each in runs.values()))
    return {name: sorted(each, key=lambda run: run.seed)[:seeds] for name, each in runs.items()}


def _gate(name: str, runs: Sequence[RunData]) -> str:
    """Why nothing is said of a scheme; empty if it has learned and reads at least half of its training length."""
    scheme, length = Scheme(name, name, list(runs)), runs[0].config.training.train_length
    gate = summary.gate(scheme)
    if gate is None or gate.learned != "yes":
        return f"{name} is not shown to have learned more than an n-gram model"
    shorter = sorted({n for run in runs for kind, n in run.levels.at if kind == PLAIN and n < length})
    upper: dict[int, float | None] = {}
    for n in shorter:
        known = t_interval(summary.per_seed(scheme, summary.rise(PLAIN, n)))
        upper[n] = known.upper if known else None
    used = levels.uses(upper, length)
    return f"{name} needs only {used} of its {length} tokens" if used is not None and 2 * used < length else ""


def _per_seed(terms: Sequence[Term], runs: Runs) -> PerSeed | str:
    """The figure of every seed that all runs have; or a sentence on a level that is missing."""
    by_seed = {name: {run.seed: run for run in each} for name, each in runs.items()}
    seeds = statistics.in_all(set(each) for each in by_seed.values())
    found: PerSeed = {}
    for seed in sorted(seeds):
        parts, targets = [], set()
        for term in terms:
            run = by_seed[term.run][seed]
            length = round(term.ratio * run.config.training.train_length)
            row = _row(run, term, length)
            if row is None or row.nll is None or row.status != "ok":
                status = row.status if row else "not measured"
                return f"{term.run} is {status} at {length} tokens ({term.protocol}, {term.kind})"
            level = run.levels.at.get((term.kind, length)) if term.protocol == "fixed_target" else None
            parts.append((term.weight, row.nll, level.blocks if level else None))
            targets.add((row.protocol, row.targets_sha256, row.dtype))
        blocks = weighted([(weight, of) for weight, _, of in parts])
        if len(targets) == len({protocol for protocol, *_ in targets}):
            found[seed] = Contrast(float(sum(weight * nll for weight, nll, _ in parts)), blocks)
    return found


def _row(run: RunData, term: Term, length: int) -> EvaluationRow | None:
    own = newest_of_split(run.rows, run.split)
    alike = (row for row in own if (row.protocol, row.kind, row.length) == (term.protocol, term.kind, length))
    return next((row for row in alike if row.task is None), None)


def _of_task(entry: Entry, runs: Runs) -> Finding:
    asked = entry.claim.learned
    assert asked is not None
    shares = []
    for name in (asked.more, asked.than):
        right = [_right(run, asked.at) for run in runs[name]]
        if None in right:
            return Finding(entry, "not testable here", f"{name} was not tested at {asked.at:g}x")
        shares.append((int(np.sum([value >= asked.right for value in right if value is not None])), len(right)))
    pair = (shares[0], shares[1])
    if not shares[0][0] and not shares[1][0]:
        return Finding(entry, "not learned", f"no seed answers {asked.right:.0%} right at {asked.at:g}x", shares=pair)
    return Finding(entry, "open", shares=pair, p=statistics.fisher(*pair).p)


def _right(run: RunData, ratio: float) -> float | None:
    found = [one for place, one in run.answers.at.items() if place.as_trained and place.ratio == ratio]
    return found[0].accuracy if found else None
