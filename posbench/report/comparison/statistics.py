"""Statistics of comparisons beside intervals: p-values and their adjustment, uneven outcomes."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from posbench.evaluation.intervals import Interval

Item = TypeVar("Item")
SEEDS_FOR_A_CLAIM = 5  # fewer give intervals too, but marked ones


def in_all(sets: Iterable[set[Item]]) -> set[Item]:
    """What all of the sets have; nothing if there are none."""
    found = list(sets)
    return set.intersection(*found) if found else set()


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted so that the chance of any false rejection among them stays at the level tested.

    Source: Holm (1979), "A simple sequentially rejective multiple test procedure".
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    scaled = [min(1.0, (len(order) - rank) * p_values[i]) for rank, i in enumerate(order)]
    adjusted = [0.0] * len(order)
    for i, p in zip(order, itertools.accumulate(scaled, max), strict=True):
        adjusted[i] = p
    return adjusted


def p_of(found: Interval, expected: float = 0.0) -> float:
    """Two-sided p of the t-test that a mean is `expected`, by its interval."""
    from scipy import special

    if not found.error:
        return float(found.mean == expected)
    return float(2 * special.stdtr(found.df, -abs(found.mean - expected) / found.error))


# -- exact tests -------------------------------------------------------------------------------------------------------

MOST_ORDERS = 200_000  # most orders to enumerate; ten against ten are 184,756


@dataclasses.dataclass(frozen=True)
class Exact:
    """An exact test of two schemes: its two-sided p, and the least p that this number of seeds can give."""

    p: float
    least: float


def fisher(first: tuple[int, int], second: tuple[int, int]) -> Exact:
    """Fisher's exact test that two schemes learn equally often; each is given as (learned, seeds)."""
    from scipy import stats

    def p(k: int, n: int, other_k: int, other_n: int) -> float:
        return float(stats.fisher_exact([[k, n - k], [other_k, other_n - other_k]]).pvalue)

    (k, n), (other_k, other_n) = first, second
    least = min(p(n, n, 0, other_n), p(0, n, other_n, other_n))
    return Exact(p(k, n, other_k, other_n), least)


def permutation(first: Sequence[float], second: Sequence[float]) -> Exact:
    """The permutation test that the seeds of two schemes have equal means, over all assignments of seeds.

    Seeds are not paired. Equal seeds train on equal problems, but the gate may keep a seed of only one scheme, and
    signs of five pairs have no p below 1/16. If equal seeds are correlated, the test is conservative. It speaks of
    these test problems, which are the same for all. One seed of a scheme shows no spread: p is then 1.
    """
    from scipy import stats

    least = min(1.0, max(2 / math.comb(len(first) + len(second), len(first)), 2 / MOST_ORDERS))
    if min(len(first), len(second)) < 2:
        return Exact(1.0, least)

    def difference(one: Any, other: Any, axis: int) -> Any:
        return np.mean(one, axis=axis) - np.mean(other, axis=axis)

    found = stats.permutation_test(
        (np.asarray(first), np.asarray(second)), difference, permutation_type="independent", vectorized=True,
        n_resamples=MOST_ORDERS, batch=10_000, rng=np.random.default_rng(0),
    )  # fmt: skip
    return Exact(float(found.pvalue), least)


# -- how uneven --------------------------------------------------------------------------------------------------------

LEAST_GAP = 0.1


def two_groups(values: Sequence[float]) -> bool:
    """Whether outcomes fall into two groups, which a mean would hide; then points are shown instead.

    The widest gap between neighbours is at least `LEAST_GAP`. With two values or more on either side it is at least
    half of the range; with one value on a side, at least twice the range of the rest. It is a hint to look at the
    points and no test: of five normal values with a spread much larger than `LEAST_GAP` one set in six meets the first
    and one in thirteen the second, of ten values one in a hundred and one in a thousand.
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    if len(ordered) < 4:
        return False
    gaps = np.diff(ordered)
    widest, whole = gaps.max(), ordered[-1] - ordered[0]
    if widest < LEAST_GAP:
        return False
    alone = bool(gaps.argmax() in (0, len(gaps) - 1) and widest >= 2 * (whole - widest))
    return alone or bool(gaps[1:-1].max() >= max(LEAST_GAP, 0.5 * whole))
