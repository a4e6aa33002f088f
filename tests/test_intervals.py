"""Intervals against textbooks and scipy; how often they hold the truth is in test_coverage.py and test_results.py."""

import math

import numpy as np
import pytest
from scipy import stats

from posbench.results.estimate import Estimate, estimate, units_of_text


def over_text(
    values: np.ndarray, documents: np.ndarray, counts: np.ndarray | None = None, stretches: np.ndarray | None = None
) -> Estimate:
    """The estimate of one checkpoint from the means of blocks."""
    counts, unit = np.full(len(values), 32.0) if counts is None else counts, units_of_text(documents, stretches)
    return estimate(np.bincount(unit, values * counts)[None], np.bincount(unit, counts))


def t_interval(means: np.ndarray) -> tuple[float, float]:
    theirs = stats.ttest_1samp(means, 0).confidence_interval(0.95)
    return pytest.approx((theirs.low, theirs.high), rel=1e-12)  # type: ignore[no-any-return]


def test_documents_of_unequal_size_weigh_by_their_tokens_as_a_ratio_of_sums_does() -> None:
    rng = np.random.default_rng(1)
    documents = np.sort(rng.integers(0, 12, 90))
    counts, values = rng.integers(1, 40, 90).astype(float), rng.normal(3, 1, 90)
    made = over_text(values, documents, counts)
    # Cochran (1977), equation 6.13, in plain loops.
    y = [sum(v * c for v, c, d in zip(values, counts, documents, strict=True) if d == at) for at in range(12)]
    x = [sum(c for c, d in zip(counts, documents, strict=True) if d == at) for at in range(12)]
    ratio = sum(y) / sum(x)
    variance = sum((b - ratio * a) ** 2 for a, b in zip(x, y, strict=True)) / 11 / 12 / (sum(x) / 12) ** 2
    assert made.mean == pytest.approx(ratio, rel=1e-12)
    assert made.error == pytest.approx(math.sqrt(variance), rel=1e-12)


def test_seeds_and_documents_are_crossed_random_factors() -> None:
    """Mean squares in plain loops: var(mean) = (MSA + MSB - MSE) / (a b), Searle, Casella & McCulloch (1992)."""
    rng = np.random.default_rng(2)
    a, b = 5, 12
    values = rng.normal(0, 0.3, (a, 1)) + rng.normal(0, 1, (1, b)) + rng.normal(0, 0.1, (a, b))
    made = estimate(values * 32, np.full(b, 32.0))
    grand = values.mean()
    msa = b * sum((values[i].mean() - grand) ** 2 for i in range(a)) / (a - 1)
    msb = a * sum((values[:, j].mean() - grand) ** 2 for j in range(b)) / (b - 1)
    left = [[values[i, j] - values[i].mean() - values[:, j].mean() + grand for j in range(b)] for i in range(a)]
    mse = sum(x * x for row in left for x in row) / ((a - 1) * (b - 1))
    variance = (msa + msb - mse) / (a * b)
    assert (made.error, made.units) == (pytest.approx(math.sqrt(variance), rel=1e-12), b)
    assert made.df == pytest.approx((msa + msb - mse) ** 2 / (msa**2 / (a - 1) + msb**2 / (b - 1)), rel=1e-12)
    alone = estimate(values.sum(1, keepdims=True) * 32, np.array([32.0 * b]))
    assert (alone.low(), alone.high()) == t_interval(values.mean(1)) and alone.units == 0


def test_few_documents_are_cut_into_contiguous_segments() -> None:
    """One document of 128 blocks: 16 segments of 8 neighbours; of two, each has its share."""
    values = np.random.default_rng(3).normal(size=128)
    made = over_text(values, np.zeros(128, int))
    assert made.units == 16 and (made.low(), made.high()) == t_interval(values.reshape(16, 8).mean(1))
    two = over_text(values, np.repeat([4, 9], [96, 32]))
    assert (two.units, two.error) == (16, pytest.approx(made.error, rel=1e-12))


def test_stretches_of_few_documents_are_the_segments_and_of_many_documents_are_not() -> None:
    values, alone = np.random.default_rng(5).normal(size=120), np.zeros(120, int)
    made = over_text(values, alone, stretches=np.arange(120) // 4)
    assert made.units == 30 and (made.low(), made.high()) == t_interval(values.reshape(30, 4).mean(1))
