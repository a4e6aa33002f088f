"""Intervals against textbooks and scipy; how often they hold the truth on real losses is in test_coverage.py."""

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

from posbench.evaluation import intervals
from posbench.evaluation.intervals import Blocks

TRIALS = 500  # the standard error of a 95 % rate over them is 1 %


def covers_as_promised(rate: float) -> bool:
    return 0.92 <= rate <= 0.97


def blocks_of(values: np.ndarray, documents: np.ndarray, counts: np.ndarray | None = None) -> Blocks:
    counts = np.full(len(values), 32.0) if counts is None else counts
    return Blocks(values * counts, counts, documents)


# -- against others ----------------------------------------------------------------------------------------------------


def test_documents_of_equal_size_give_the_t_interval_of_their_means() -> None:
    values, documents = np.random.default_rng(0).normal(4, 1, 60), np.repeat(np.arange(20), 3)
    found = intervals.over_text(blocks_of(values, documents))
    means = values.reshape(20, 3).mean(1)
    theirs = stats.ttest_1samp(means, 0).confidence_interval(0.95)
    assert found is not None and (found.units, found.kind, found.over) == (20, "documents", "documents")
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), rel=1e-12)


def test_documents_of_unequal_size_weigh_by_their_tokens_as_a_ratio_of_sums_does() -> None:
    rng = np.random.default_rng(1)
    documents = np.sort(rng.integers(0, 12, 90))
    counts, values = rng.integers(1, 40, 90).astype(float), rng.normal(3, 1, 90)
    found = intervals.over_text(blocks_of(values, documents, counts))
    # Cochran (1977), equation 6.13, in plain loops.
    y = [sum(v * c for v, c, d in zip(values, counts, documents, strict=True) if d == one) for one in range(12)]
    x = [sum(c for c, d in zip(counts, documents, strict=True) if d == one) for one in range(12)]
    ratio = sum(y) / sum(x)
    variance = sum((b - ratio * a) ** 2 for a, b in zip(x, y, strict=True)) / 11 / 12 / (sum(x) / 12) ** 2
    assert found is not None and found.mean == pytest.approx(ratio, rel=1e-12)
    assert found.error == pytest.approx(math.sqrt(variance), rel=1e-12)


def test_seeds_and_documents_are_crossed_random_factors() -> None:
    """Mean squares in plain loops: var(mean) = (MSA + MSB - MSE) / (a b), Searle, Casella & McCulloch (1992)."""
    rng = np.random.default_rng(2)
    a, b = 5, 12
    values = rng.normal(0, 0.3, (a, 1)) + rng.normal(0, 1, (1, b)) + rng.normal(0, 0.1, (a, b))
    found = intervals.over_seeds_and_text([blocks_of(row, np.arange(b)) for row in values])
    grand = values.mean()
    msa = b * sum((values[i].mean() - grand) ** 2 for i in range(a)) / (a - 1)
    msb = a * sum((values[:, j].mean() - grand) ** 2 for j in range(b)) / (b - 1)
    left = [[values[i, j] - values[i].mean() - values[:, j].mean() + grand for j in range(b)] for i in range(a)]
    mse = sum(x * x for row in left for x in row) / ((a - 1) * (b - 1))
    variance = (msa + msb - mse) / (a * b)
    df = (msa + msb - mse) ** 2 / (msa**2 / (a - 1) + msb**2 / (b - 1))
    assert found is not None and (found.seeds, found.units, found.over) == (a, b, "seeds and documents")
    assert (found.mean, found.error) == pytest.approx((grand, math.sqrt(variance)), rel=1e-12)
    assert found.df == pytest.approx(df, rel=1e-12)


def test_tests_and_bounds_are_scipys() -> None:
    values = [0.013, -0.004, 0.021, 0.008, 0.017]
    found = intervals.over_seeds(values)
    t_test = stats.ttest_1samp(values, 0)
    assert (found.low, found.high) == pytest.approx(tuple(t_test.confidence_interval(0.95)), rel=1e-12)
    upper = stats.ttest_1samp(values, 0, alternative="less").confidence_interval(0.95).high
    assert found.upper == pytest.approx(upper, rel=1e-12)
    assert found.over == "seeds"


# -- what they condition on --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("of_documents", "falls_short"), [(0.5, "seeds"), (0.1, "documents")])
def test_an_interval_over_one_of_both_does_not_cover_the_other(of_documents: float, falls_short: str) -> None:
    rng = np.random.default_rng(5)
    hits = {"both": 0, "seeds": 0, "documents": 0}
    for _ in range(TRIALS):
        values = 0.1 + rng.normal(0, 0.1, (5, 1)) + rng.normal(0, of_documents, (1, 30)) + rng.normal(0, 0.1, (5, 30))
        each = [blocks_of(row, np.arange(30)) for row in values]
        found = {
            "both": intervals.over_seeds_and_text(each),
            "seeds": intervals.over_seeds(values.mean(1).tolist()),
            "documents": intervals.over_text(blocks_of(values.mean(0), np.arange(30))),
        }
        for name, interval in found.items():
            assert interval is not None
            hits[name] += interval.low <= 0.1 <= interval.high
    assert covers_as_promised(hits["both"] / TRIALS)
    assert hits[falls_short] / TRIALS < 0.85


def test_seeds_on_different_texts_are_refused() -> None:
    one = blocks_of(np.ones(20), np.arange(20))
    for documents in (np.arange(20) // 2, np.arange(19)):
        other = blocks_of(np.ones(len(documents)), documents)
        with pytest.raises(ValueError, match="same text"):
            intervals.over_seeds_and_text([one, other])
    with pytest.raises(ValueError, match="two"):
        intervals.over_seeds([0.5])


def test_few_documents_are_cut_into_contiguous_segments() -> None:
    """One document of 128 blocks: 16 segments of 8 neighbours; of two, each has its share."""
    values = np.random.default_rng(3).normal(size=128)
    found = intervals.over_text(blocks_of(values, np.zeros(128, int)))
    theirs = stats.ttest_1samp(values.reshape(16, 8).mean(1), 0).confidence_interval(0.95)
    assert found is not None and (found.units, found.kind) == (16, "segments")
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), rel=1e-12)
    two = intervals.over_text(blocks_of(values, np.repeat([4, 9], [96, 32])))
    assert two is not None and (two.units, two.error) == (16, pytest.approx(found.error, rel=1e-12))


def test_stretches_of_few_documents_are_the_segments_and_of_many_documents_are_not() -> None:
    values = np.random.default_rng(5).normal(size=120)
    stretch, alone = np.arange(120) // 4, blocks_of(values, np.zeros(120, int))
    found = intervals.over_text(dataclasses.replace(alone, stretches=stretch))
    theirs = stats.ttest_1samp(values.reshape(30, 4).mean(1), 0).confidence_interval(0.95)
    assert found is not None and (found.units, found.kind) == (30, "segments")
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), rel=1e-12)
    nine = blocks_of(values, np.arange(120) * 9 // 120)
    assert intervals.over_text(dataclasses.replace(nine, stretches=stretch)) == intervals.over_text(nine)
    few = intervals.over_text(dataclasses.replace(alone, stretches=np.arange(120) // 30))
    assert few == intervals.over_text(alone)  # four stretches are too few units


@pytest.mark.parametrize("number", [1, 7])
def test_a_single_unit_has_no_interval(number: int) -> None:
    assert intervals.over_text(blocks_of(np.ones(1), np.zeros(1, int))) is None
    assert intervals.over_text(blocks_of(np.ones(number + 1), np.zeros(number + 1, int))) is not None


def test_values_that_agree_to_the_last_bit_have_no_width_and_no_warning() -> None:
    found = intervals.over_seeds([0.5, 0.5, 0.5])
    assert found.low == found.mean == found.high == found.upper == 0.5
    both = intervals.over_seeds_and_text([blocks_of(np.ones(20), np.arange(20))] * 3)
    assert both is not None and both.low == both.high == 1.0


# -- error rates -------------------------------------------------------------------------------------------------------


def test_a_difference_of_zero_is_found_in_one_of_twenty_trials() -> None:
    rng = np.random.default_rng(6)
    drawn = [intervals.over_seeds(rng.normal(0, 0.05, 5).tolist()) for _ in range(TRIALS)]
    assert covers_as_promised(float(np.mean([one.low <= 0 <= one.high for one in drawn])))
    assert covers_as_promised(float(np.mean([one.upper >= 0 for one in drawn])))


# -- how many documents ------------------------------------------------------------------------------------------------


def test_a_reader_is_told_of_few_documents_and_of_one_that_is_most_of_the_text() -> None:
    many = intervals.documents_of(blocks_of(np.ones(80), np.arange(80) // 2))
    assert many is not None and (many.number, many.effective, many.warning) == (40, pytest.approx(40), None)
    uneven = intervals.documents_of(blocks_of(np.ones(128), np.minimum(np.arange(128), 40)))
    assert uneven is not None and uneven.number == 41 and uneven.largest == 88 / 128
    assert uneven.effective == pytest.approx(128**2 / (40 + 88**2))
    assert uneven.warning is not None and uneven.warning.startswith(
        "69% of the targets behind each figure stand in one"
    )
    assert "one of 41 documents, effectively 2.1 of equal size: " in uneven.warning
    few = intervals.documents_of(blocks_of(np.ones(9), np.arange(9)))
    assert few is not None and few.warning == (
        "Only 9 documents, effectively 9.0 of equal size, stand behind each figure: "
        "intervals are less certain than they say."
    )
    for number, warned in ((19, True), (20, False)):
        even = intervals.documents_of(blocks_of(np.ones(4 * number), np.arange(4 * number) // 4))
        assert even is not None and bool(even.warning) == warned
    large = np.repeat([0, 1, 2, 3], 8)  # with 26 small ones: effectively 11.6 of 30, though none has a third
    thirty = intervals.documents_of(blocks_of(np.ones(58), np.concatenate([large, np.arange(4, 30)])))
    assert thirty is not None and thirty.effective == pytest.approx(58**2 / (4 * 64 + 26)) and thirty.warning
    alone = intervals.documents_of(blocks_of(np.ones(9), np.zeros(9, int)))
    assert alone is not None and alone.warning is not None
    assert alone.warning.startswith("Only one document stands behind each figure: intervals are over segments")
