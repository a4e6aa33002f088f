"""The words of a report. Each is a claim, and an interval that holds jointly with all others must show it.

All figures that words speak of get intervals that contain the truth all at once in 95 of 100 reports: nll at the
training length and the rise at 4x of each scheme against the reference, and each scheme's own rise at longer lengths.
A word is said only if the whole interval lies where the word is true. So words never contradict each other, and the
chance of any wrong word in a report is at most 5 %, whatever the truth is. Two things keep intervals short:

- Seeds are few, so the variance of one scheme over seeds is poorly known. It is moderated: a weighted mean of its own
  and of that of all schemes, with more degrees of freedom (Smyth, 2004, "Linear Models and Empirical Bayes Methods for
  Assessing Differential Expression in Microarray Experiments"). If schemes differ in it, each goes by its own.
- The rises of one scheme are tested in a fixed order, which costs one test and not one per length.

Each interval has the same level, 1 - (1 - alpha)^(1/m) for m intervals (Sidak, 1967), by its own degrees of freedom.
The quantile of the joint distribution with a shared reference is smaller by 2 % at most (scripts/words.py quantiles).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from posbench.evaluation.intervals import Interval, with_seed_variance

ALPHA = 0.04  # chance of any wrong word in a report
LEAST_SCHEMES = 4  # fewer tell nothing of how variances differ


@dataclasses.dataclass(frozen=True)
class Bounds:
    """An interval that holds jointly with all others of a report."""

    low: float
    high: float


def level(intervals: int) -> float:
    """The chance at which each of so many intervals may miss, if any of them may with chance `ALPHA`."""
    return -math.expm1(math.log1p(-ALPHA) / max(1, intervals))


def bounds(found: Interval, level: float) -> Bounds:
    half = found.half_at(level)
    return Bounds(found.mean - half, found.mean + half)


# -- variance over seeds -----------------------------------------------------------------------------------------------


def moderated(found: Mapping[str, Interval]) -> dict[str, Interval]:
    """The intervals of one figure for several schemes, the variance over seeds of each moderated by that of all.

    The weight of the common variance follows from how much the variances differ, by the upper 90 % bound of that. Its
    degrees of freedom are no more than a mean of correlated variances has: differences from one reference share its
    seeds. Intervals without seeds, or of fewer than `LEAST_SCHEMES` schemes, stay as they are.
    """
    known = {label: np.array(one.each) for label, one in found.items() if len(one.each) >= 2}
    variances = {label: float(values.var(ddof=1)) for label, values in known.items()}
    positive = [label for label, variance in variances.items() if variance > 0]
    if len(positive) < LEAST_SCHEMES:
        return dict(found)
    df = {label: len(values) - 1 for label, values in known.items()}
    prior_df, prior = _prior([variances[label] for label in positive], [df[label] for label in positive])
    shared = _shared([known[label] for label in positive])
    made = dict(found)
    for label, variance in variances.items():
        weight = prior_df / (prior_df + df[label]) if math.isfinite(prior_df) else 1.0
        of_mean = shared + (1 - shared) / len(positive)  # variance of the mean of variances, as a share of one's
        most = df[label] / (weight**2 * of_mean + (1 - weight) ** 2 + 2 * weight * (1 - weight) * of_mean)
        mixed = weight * prior + (1 - weight) * variance
        made[label] = with_seed_variance(found[label], mixed, min(prior_df + df[label], most))
    return made


def _prior(variances: Sequence[float], df: Sequence[int]) -> tuple[float, float]:
    """Degrees of freedom and value of the common variance: Smyth (2004), section 6.2, with an upper bound."""
    from scipy import special, stats

    half = np.array(df) / 2
    logs = np.log(variances) - special.digamma(half) + np.log(half)
    n = len(logs)
    spread = logs.var(ddof=1) * (n - 1) / stats.chi2.ppf(0.1, n - 1) - special.polygamma(1, half).mean()
    if spread <= 0:
        return math.inf, math.exp(logs.mean())
    prior = 2 * _inverse_trigamma(float(spread))
    return prior, math.exp(logs.mean() + special.digamma(prior / 2) - math.log(prior / 2))


def _inverse_trigamma(value: float) -> float:
    from scipy import optimize, special

    return float(math.exp(optimize.brentq(lambda x: special.polygamma(1, math.exp(x)) - value, -30, 30)))


def _shared(each: Sequence[np.ndarray]) -> float:
    """The mean squared correlation of estimated variances, from that of the values of equal seeds."""
    if len({len(values) for values in each}) > 1:
        return 0.25  # of differences from a reference that varies as much as the others
    together = np.corrcoef(np.stack(each))
    mean = (together.sum() - len(each)) / (len(each) * (len(each) - 1))
    return float(np.clip(mean, 0, 1) ** 2)


# -- words -------------------------------------------------------------------------------------------------------------

LEAST = 0.02  # nats per token: a smaller difference is not called better or worse

Beyond = Literal["less", "worse", "open"]
AtOne = Literal["better", "worse", "open"]


def at_one(nll: Bounds, least: float = LEAST) -> AtOne:
    """The word for a difference of nll at the training length."""
    side = _side(nll, least)
    return "open" if side == 0 else "worse" if side > 0 else "better"


def beyond(rise: Bounds, least: float = LEAST) -> Beyond:
    """The word for a difference of the rise."""
    side = _side(rise, least)
    return "open" if side == 0 else "worse" if side > 0 else "less"


def _side(found: Bounds, least: float) -> int:
    """The sign of a difference that is resolved and at least `least` by its estimate; else 0."""
    if abs(found.low + found.high) / 2 < least:
        return 0
    return 1 if found.low > 0 else -1 if found.high < 0 else 0


@dataclasses.dataclass(frozen=True)
class Reach:
    """How far a scheme holds, in tokens of context. Between `length` and `breaks` it is not resolved."""

    length: int  # it holds to this; the training length if it is not shown to hold at any longer one
    longest_measured: bool  # nothing longer was measured: it may hold further
    breaks: int | None = None  # the shortest length from which on it breaks; None if it is not shown to
    resolved: bool = True  # at the length after `length` it breaks or is undefined


def reach(rises: Mapping[int, Bounds | None], train_length: int, limit: float) -> Reach:
    """Holds: the upper bound of the rise is at most `limit`, as at all shorter lengths. Breaks: the lower bound is
    above it, as at all longer lengths.

    Args:
        rises: by every measured length above the training length; None where the scheme is undefined.
    """
    lengths = sorted(rises)
    known = {length: found for length in lengths if (found := rises[length]) is not None}
    held, breaks = train_length, None
    for length in lengths:
        if length not in known or not known[length].high <= limit:
            break
        held = length
    for length in sorted(known, reverse=True):
        if not known[length].low > limit:
            break
        breaks = length
    after = next((length for length in lengths if length > held), None)
    resolved = after is None or after not in known or (breaks is not None and breaks <= after)
    return Reach(held, after is None, breaks, resolved)
