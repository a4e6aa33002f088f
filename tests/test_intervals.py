"""Intervals against textbooks and scipy, and how often they hold the truth on the
losses of trained models.

Documents are drawn from those measured, blocks dealt to them, seeds drawn from the runs
(scripts/coverage.py).
"""

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from support import script

from posbench.estimate import Estimate, estimate, units_of_text

LOSSES = Path(__file__).parent / "data" / "losses.npz"
TRIALS = 500  # the standard error of a 95 % rate over them is 1 %


def over_text(
    values: np.ndarray, documents: np.ndarray, stretches: np.ndarray | None = None
) -> Estimate:
    """Return the estimate of one checkpoint from the means of blocks of 32 tokens."""
    unit = units_of_text(documents, stretches)
    sums = np.bincount(unit, 32 * values)
    tokens = 32 * np.bincount(unit)
    return estimate(sums[None], tokens)


def check_interval(made: Estimate, means: np.ndarray) -> None:
    """Check that an interval is Student's over means."""
    theirs = stats.ttest_1samp(means, 0).confidence_interval(0.95)
    assert made.low() == pytest.approx(theirs.low, rel=1e-12)
    assert made.high() == pytest.approx(theirs.high, rel=1e-12)


def test_documents_of_unequal_size_weigh_by_their_tokens_as_a_ratio_of_sums_does():
    """Cochran (1977), equation 6.13, in plain loops."""
    rng = np.random.default_rng(1)
    n = 12
    tokens = rng.integers(1, 400, n).astype(float)
    sums = tokens * rng.normal(3, 1, n)

    made = estimate(sums[None], tokens)

    ratio = sums.sum() / tokens.sum()
    squares = 0.0
    for i in range(n):
        residual = sums[i] - ratio * tokens[i]
        squares += residual**2
    variance = squares / (n - 1) / n / tokens.mean() ** 2
    error = math.sqrt(variance)
    assert made.mean == pytest.approx(ratio, rel=1e-12)
    assert made.error == pytest.approx(error, rel=1e-12)


def crossed() -> np.ndarray:
    """Return losses of five seeds on twelve documents."""
    rng = np.random.default_rng(2)
    of_seed = rng.normal(0, 0.3, (5, 1))
    of_document = rng.normal(0, 1, (1, 12))
    noise = rng.normal(0, 0.1, (5, 12))
    return of_seed + of_document + noise


def test_seeds_and_documents_are_crossed_random_factors():
    """Mean squares in plain loops: var(mean) = (MSA + MSB - MSE) / (a b), Searle,
    Casella & McCulloch (1992).
    """
    values = crossed()
    a, b = values.shape

    tokens = np.full(b, 32.0)
    made = estimate(32 * values, tokens)

    grand = values.mean()
    seeds = values.mean(1)
    documents = values.mean(0)
    df_a = a - 1
    df_b = b - 1
    msa = b * sum((seeds - grand) ** 2) / df_a
    msb = a * sum((documents - grand) ** 2) / df_b
    mse = 0.0
    for i in range(a):
        for j in range(b):
            left = values[i, j] - seeds[i] - documents[j] + grand
            mse += left**2 / (df_a * df_b)
    variance = msa + msb - mse
    error = math.sqrt(variance / (a * b))
    df = variance**2 / (msa**2 / df_a + msb**2 / df_b)
    assert made.error == pytest.approx(error, rel=1e-12)
    assert made.df == pytest.approx(df, rel=1e-12)
    assert made.units == b


def test_of_one_document_the_interval_is_over_seeds():
    values = crossed()
    sums = 32 * values.sum(1, keepdims=True)

    tokens = np.array([32.0 * 12])
    made = estimate(sums, tokens)

    check_interval(made, values.mean(1))
    assert made.units == 0


def test_of_one_seed_the_interval_is_over_documents():
    losses = np.array([3.0, 5.0])
    made = estimate(losses[None], np.ones(2))
    check_interval(made, losses)


BLOCKS = np.random.default_rng(3).normal(size=128)
ONE_DOCUMENT = np.zeros(128, int)


def test_one_document_is_cut_into_segments_of_neighbours():
    made = over_text(BLOCKS, ONE_DOCUMENT)
    assert made.units == 16
    segments = BLOCKS.reshape(16, 8)
    check_interval(made, segments.mean(1))


def test_each_of_few_documents_has_its_share_of_the_segments():
    two_documents = np.repeat([4, 9], [96, 32])
    of_two = over_text(BLOCKS, two_documents)
    of_one = over_text(BLOCKS, ONE_DOCUMENT)
    assert of_two.units == 16
    assert of_two.error == pytest.approx(of_one.error)


def test_no_document_is_left_without_a_segment():
    documents = np.repeat([4, 9], [126, 2])
    made = over_text(BLOCKS, documents)
    assert made.units == 17


def test_the_segments_of_a_text_are_the_stretches_that_were_held_out():
    stretches = np.arange(128) // 4
    made = over_text(BLOCKS, ONE_DOCUMENT, stretches)
    assert made.units == 32
    segments = BLOCKS.reshape(32, 4)
    check_interval(made, segments.mean(1))


def check_coverage(
    schemes: tuple[str, ...],
    quantity: str,
    documents: int,
    method: str,
    least: float,
    most: float,
) -> None:
    study = script("coverage")
    population = study.population(LOSSES, *schemes)
    share, _ = study.coverage(population, quantity, documents, method, TRIALS)
    assert least <= share <= most


@pytest.mark.sample(8)
@pytest.mark.parametrize("schemes", [("rope",), ("alibi", "rope")])
@pytest.mark.parametrize("quantity", ["1x", "rise 4x", "rise 16x"])
@pytest.mark.parametrize("documents", [8, 20, 60])
@pytest.mark.parametrize(
    "method", ["one checkpoint, documents", "five seeds, seeds and documents"]
)
def test_intervals_hold_the_truth_as_often_as_they_say(
    schemes, quantity, documents, method
):
    check_coverage(schemes, quantity, documents, method, 0.92, 0.97)


def test_intervals_over_segments_hold_the_truth():
    method = "one checkpoint, segments (documents as chapters of one)"
    check_coverage(("rope",), "1x", 20, method, 0.9, 1)


NOT_USED = [
    (8, "one checkpoint, blocks", 0.86),
    (20, "five seeds, seeds", 0.5),
]


@pytest.mark.slow
@pytest.mark.parametrize(("documents", "method", "most"), NOT_USED)
def test_intervals_that_posbench_does_not_use_hold_the_truth_less_often(
    documents, method, most
):
    check_coverage(("rope",), "1x", documents, method, 0, most)


def test_stretches_of_a_text_hold_its_mean():
    """Losses that drift along one text, over some thousands of tokens, as those of real
    novels do.
    """
    rng = np.random.default_rng(7)
    characters = 500_000
    tokens = characters // 3
    steps = rng.normal(size=characters // 3200 + 20)
    kernel = np.ones(20) / math.sqrt(20)
    slow = np.convolve(steps, kernel, "valid")
    places = np.linspace(0, tokens, len(slow))
    drift = np.interp(np.arange(tokens), places, slow)
    losses = rng.gamma(1, 3, size=tokens) + 0.4 * drift

    coverage = script("coverage")
    share, _, units = coverage.of_regions(losses, characters, TRIALS)

    assert share >= 0.92
    assert units == 15
