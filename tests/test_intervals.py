"""Intervals against textbooks and scipy, and how often they hold the truth on the
losses of trained models.

Documents are drawn from those measured, blocks dealt to them, seeds drawn from the runs
(scripts/coverage.py).
"""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from support import script

from posbench.results.estimate import Estimate, estimate, units_of_text

LOSSES = Path(__file__).parent / "data" / "losses.npz"
TRIALS = 500  # the standard error of a 95 % rate over them is 1 %
ROPE = ("rope",)
DIFFERENCE = ("alibi", "rope")
ONE, FIVE = "one checkpoint, documents", "five seeds, seeds and documents"
USED = itertools.product(
    (ROPE, DIFFERENCE), ("1x", "rise 4x", "rise 16x"), (8, 20, 60), (ONE, FIVE)
)


def over_text(
    values: np.ndarray,
    documents: np.ndarray,
    counts: np.ndarray | None = None,
    stretches: np.ndarray | None = None,
) -> Estimate:
    """Return the estimate of one checkpoint from the means of blocks."""
    counts = np.full(len(values), 32.0) if counts is None else counts
    unit = units_of_text(documents, stretches)
    return estimate(np.bincount(unit, values * counts)[None], np.bincount(unit, counts))


def t_interval(means: np.ndarray) -> tuple[float, float]:
    theirs = stats.ttest_1samp(means, 0).confidence_interval(0.95)
    return pytest.approx((theirs.low, theirs.high), rel=1e-12)  # type: ignore[no-any-return]


def test_documents_of_unequal_size_weigh_by_their_tokens_as_a_ratio_of_sums_does():
    rng = np.random.default_rng(1)
    documents = np.sort(rng.integers(0, 12, 90))
    counts = rng.integers(1, 40, 90).astype(float)
    values = rng.normal(3, 1, 90)
    made = over_text(values, documents, counts)
    # Cochran (1977), equation 6.13, in plain loops.
    y = [
        sum(v * c for v, c, d in zip(values, counts, documents, strict=True) if d == at)
        for at in range(12)
    ]
    x = [
        sum(c for c, d in zip(counts, documents, strict=True) if d == at)
        for at in range(12)
    ]
    ratio = sum(y) / sum(x)
    variance = (
        sum((b - ratio * a) ** 2 for a, b in zip(x, y, strict=True))
        / 11
        / 12
        / (sum(x) / 12) ** 2
    )
    assert made.mean == pytest.approx(ratio, rel=1e-12)
    assert made.error == pytest.approx(math.sqrt(variance), rel=1e-12)


def test_seeds_and_documents_are_crossed_random_factors():
    """Mean squares in plain loops: var(mean) = (MSA + MSB - MSE) / (a b), Searle,
    Casella & McCulloch (1992).
    """
    rng = np.random.default_rng(2)
    a, b = 5, 12
    values = (
        rng.normal(0, 0.3, (a, 1))
        + rng.normal(0, 1, (1, b))
        + rng.normal(0, 0.1, (a, b))
    )
    made = estimate(values * 32, np.full(b, 32.0))
    grand = values.mean()
    msa = b * sum((values[i].mean() - grand) ** 2 for i in range(a)) / (a - 1)
    msb = a * sum((values[:, j].mean() - grand) ** 2 for j in range(b)) / (b - 1)
    left = [
        [
            values[i, j] - values[i].mean() - values[:, j].mean() + grand
            for j in range(b)
        ]
        for i in range(a)
    ]
    mse = sum(x * x for row in left for x in row) / ((a - 1) * (b - 1))
    assert made.error == pytest.approx(
        math.sqrt((msa + msb - mse) / (a * b)), rel=1e-12
    )
    assert made.units == b
    assert made.df == pytest.approx(
        (msa + msb - mse) ** 2 / (msa**2 / (a - 1) + msb**2 / (b - 1)), rel=1e-12
    )
    alone = estimate(values.sum(1, keepdims=True) * 32, np.array([32.0 * b]))
    assert (alone.low(), alone.high()) == t_interval(values.mean(1))
    assert alone.units == 0


def test_few_documents_are_cut_into_segments_which_are_the_stretches_that_were_held_out_of_them():
    """One document of 128 blocks: 16 segments of 8 neighbours; of two, each has its
    share.
    """
    values = np.random.default_rng(3).normal(size=128)
    alone = np.zeros(128, int)
    made = over_text(values, alone)
    assert made.units == 16
    assert (made.low(), made.high()) == t_interval(values.reshape(16, 8).mean(1))
    two = over_text(values, np.repeat([4, 9], [96, 32]))
    assert two.units == 16
    assert two.error == pytest.approx(made.error, rel=1e-12)
    # none has no share
    assert over_text(values, np.repeat([4, 9], [126, 2])).units == 17
    pair = estimate(np.array([[3.0, 5.0]]), np.ones(2))
    assert (pair.low(), pair.high()) == t_interval(np.array([3.0, 5.0]))
    held_out = over_text(values, alone, stretches=np.arange(128) // 4)
    assert held_out.units == 32
    assert (held_out.low(), held_out.high()) == t_interval(
        values.reshape(32, 4).mean(1)
    )


@pytest.mark.sample(11)
@pytest.mark.parametrize(
    ("scheme", "quantity", "documents", "method", "least", "most"),
    [
        *((*case, 0.92, 0.97) for case in USED),
        (
            ROPE,
            "1x",
            20,
            "one checkpoint, segments (documents as chapters of one)",
            0.9,
            1,
        ),
        # what posbench does not use
        (ROPE, "1x", 8, "one checkpoint, blocks", 0, 0.86),
        (ROPE, "rise 16x", 8, "one checkpoint, blocks", 0, 0.92),
        (ROPE, "1x", 20, "five seeds, seeds", 0, 0.5),
        (DIFFERENCE, "rise 16x", 20, "five seeds, seeds", 0, 0.85),
    ],
)
def test_intervals_hold_the_truth_as_often_as_they_say(
    scheme, quantity, documents, method, least, most
):
    study = script("coverage")
    share, _ = study.coverage(
        study.population(LOSSES, *scheme), quantity, documents, method, TRIALS
    )
    assert least <= share <= most


def test_stretches_of_a_text_hold_its_mean():
    """Losses that drift along one text, over some thousands of tokens, as those of real
    novels do.
    """
    rng = np.random.default_rng(7)
    characters = 500_000
    tokens = 500_000 // 3
    slow = np.convolve(
        rng.normal(size=characters // 3200 + 20), np.ones(20) / 20**0.5, "valid"
    )
    drift = np.interp(np.arange(tokens), np.linspace(0, tokens, len(slow)), slow)
    share, _, units = script("coverage").of_regions(
        rng.gamma(1, 3, size=tokens) + 0.4 * drift, characters, TRIALS
    )
    assert share >= 0.92
    assert units == 15
