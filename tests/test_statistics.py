import math

import numpy as np
import pytest

from posbench.evaluation.statistics import (
    Reach,
    block_bootstrap,
    block_interval,
    block_sd,
    block_upper,
    blocks_needed,
    difference_p,
    equivalence_p,
    holm,
    reach,
    seeds_needed,
    t_interval,
    t_upper,
    two_groups,
)

TRIALS = 500  # the standard error of a 95 % rate over them is 1 %


def covers_as_promised(rate: float) -> bool:
    return 0.92 <= rate <= 0.97


def simulated_seeds(rng: np.random.Generator, n_seeds: int, effect: float) -> tuple[np.ndarray, np.ndarray]:
    """nll of two schemes per seed and block: text and seed are shared, so that only their difference is sharp."""
    blocks = rng.normal(4.0, 1.1, size=64)  # the text, the same for all
    seeds = rng.normal(0.0, 0.05, size=(n_seeds, 1))  # the luck of a seed, common to both schemes
    noise = rng.normal(0.0, 0.2, size=(2, n_seeds, 64)) + rng.normal(0.0, 0.02, size=(2, n_seeds, 1))
    return blocks + seeds + noise[0], blocks + seeds + effect + noise[1]


# -- coverage on data whose truth is known -----------------------------------------------------------------------------


def test_block_bootstrap_covers_the_true_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(TRIALS):
        counts = rng.integers(20, 40, size=128).astype(float)
        sums = counts * (3.0 + rng.normal(0, 0.5, size=128))
        low, high = block_bootstrap(sums, counts, samples=500, seed=trial)
        hits += low <= 3.0 <= high
    assert covers_as_promised(hits / TRIALS)


def test_block_interval_of_a_paired_difference_covers_it_even_if_blocks_are_skewed() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(TRIALS):
        difference = rng.exponential(0.2, size=128)  # a scheme that blows up on some blocks; its mean is 0.2
        interval = block_interval(32 * difference, np.full(128, 32.0), samples=500)
        hits += interval.low <= 0.2 <= interval.high
    assert covers_as_promised(hits / TRIALS)


def test_one_sided_block_bound_lies_above_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(2)
    counts = np.full(128, 32.0)
    hits = sum(block_upper(32 * rng.normal(0.03, 0.3, size=128), counts, 500) >= 0.03 for _ in range(TRIALS))
    assert covers_as_promised(hits / TRIALS)


@pytest.mark.parametrize("n_seeds", [2, 3, 5, 10])
def test_t_interval_over_paired_seeds_covers_the_true_difference(n_seeds: int) -> None:
    rng = np.random.default_rng(n_seeds)
    hits = 0
    for _ in range(TRIALS):
        a, b = simulated_seeds(rng, n_seeds, effect=0.1)
        interval = t_interval((b - a).mean(1))
        hits += interval.low <= 0.1 <= interval.high
    assert covers_as_promised(hits / TRIALS)


def test_one_sided_seed_bound_lies_above_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(4)
    hits = sum(t_upper(rng.normal(0.04, 0.05, size=5)) >= 0.04 for _ in range(TRIALS))
    assert covers_as_promised(hits / TRIALS)


def test_resampling_blocks_would_not_cover_what_holds_for_a_scheme() -> None:
    """The reason why a comparison of schemes takes its interval over seeds."""
    rng = np.random.default_rng(5)
    hits = 0
    for _ in range(100):
        difference = 0.1 + rng.normal(0, 0.1, size=(5, 1)) + rng.normal(0, 0.1, size=(5, 64))
        interval = block_interval(difference.mean(0), np.ones(64), samples=200)
        hits += interval.low <= 0.1 <= interval.high
    assert hits / 100 < 0.6


# -- tests and their error rates ---------------------------------------------------------------------------------------


def test_a_difference_of_zero_is_found_in_one_of_twenty_trials() -> None:
    rng = np.random.default_rng(6)
    rate = np.mean([difference_p(rng.normal(0, 0.05, size=5)) < 0.05 for _ in range(TRIALS)])
    assert covers_as_promised(1 - rate)


def test_schemes_exactly_at_the_margin_pass_for_equivalent_in_one_of_twenty_trials() -> None:
    rng = np.random.default_rng(7)
    rate = np.mean([equivalence_p(rng.normal(0.03, 0.01, size=5), margin=0.03) < 0.05 for _ in range(TRIALS)])
    assert covers_as_promised(1 - rate)


def test_equivalence_needs_precision_and_not_just_a_small_mean() -> None:
    assert equivalence_p([0.001, -0.002, 0.003, 0.000, -0.001], margin=0.03) < 0.001
    assert equivalence_p([0.05, -0.05, 0.04, -0.04, 0.00], margin=0.03) > 0.05


def test_holm_keeps_the_chance_of_any_false_finding() -> None:
    rng = np.random.default_rng(8)
    any_found = [min(holm([difference_p(rng.normal(0, 1, 5)) for _ in range(6)])) < 0.05 for _ in range(TRIALS)]
    assert np.mean(any_found) <= 0.07  # two standard errors of 500 trials are 2 %


def test_holm_agrees_with_a_worked_example_and_keeps_the_order_of_its_arguments() -> None:
    # Sorted .005 .01 .03 .04, times 4 3 2 1; .04 is raised to .06, since no p may fall below an earlier one.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    assert holm([0.7, 0.9]) == [1.0, 1.0]


def test_identical_seeds_have_no_width_and_no_warning() -> None:
    interval = t_interval([0.5, 0.5, 0.5])
    assert interval.low == interval.mean == interval.high == 0.5
    assert difference_p([0.5, 0.5]) == 0.0
    assert difference_p([0.0, 0.0]) == 1.0
    assert equivalence_p([0.0, 0.0], 0.03) == 0.0
    assert equivalence_p([0.5, 0.5], 0.03) == 1.0


def test_one_seed_gives_no_interval_over_seeds() -> None:
    with pytest.raises(ValueError, match="two"):
        t_interval([0.5])


def test_t_interval_is_the_textbooks() -> None:
    interval = t_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    # mean 3, sd sqrt(2.5), t(.975, 4) = 2.776: half width 1.963
    assert (interval.low, interval.high) == pytest.approx((1.0367, 4.9633), abs=1e-4)
    assert (interval.n, interval.over) == (5, "seeds")
    assert interval.error == pytest.approx(math.sqrt(2.5 / 5))


def test_block_bootstrap_of_equal_blocks_has_no_width() -> None:
    low, high = block_bootstrap(np.full(10, 6.0), np.full(10, 2.0), samples=100)
    assert low == high == 3.0


def test_block_sd_weights_blocks_by_their_tokens() -> None:
    values = np.array([1.0, 2.0, 3.0, 4.0])
    assert block_sd(values * 7, np.full(4, 7.0)) == pytest.approx(values.std(ddof=1))
    assert math.isnan(block_sd(np.ones(1), np.ones(1)))


# -- planning ----------------------------------------------------------------------------------------------------------


def test_blocks_needed_follows_the_usual_formula() -> None:
    assert blocks_needed(0.115, 0.02) == 260  # (2.8 x .115 / .02)^2 = 259.2
    assert blocks_needed(0.33, 0.02) == 2135
    assert blocks_needed(0.0, 0.02) == 2


def test_as_many_seeds_as_needed_find_the_difference_four_times_in_five() -> None:
    rng = np.random.default_rng(9)
    n = seeds_needed(sd=0.02, difference=0.03)
    found = np.mean([difference_p(rng.normal(0.03, 0.02, size=n)) < 0.05 for _ in range(TRIALS)])
    assert 0.75 <= found <= 0.92  # n is a whole number, so the power is 80 % or somewhat more
    assert n == 6
    assert seeds_needed(sd=1e-6, difference=0.03) == 2


# -- reach and groups --------------------------------------------------------------------------------------------------


def test_reach_is_the_last_length_before_the_first_that_fails() -> None:
    assert reach({128: 0.01, 256: 0.05, 512: 0.2}, 64) == Reach(256, longest_measured=False)
    assert reach({128: 0.2, 256: 0.01}, 64) == Reach(64, longest_measured=False)


def test_reach_ends_where_a_scheme_is_undefined_or_not_a_number() -> None:
    assert reach({128: 0.01, 256: None, 512: 0.0}, 64) == Reach(128, longest_measured=False)
    assert reach({128: math.nan}, 64) == Reach(64, longest_measured=False)


def test_reach_says_when_nothing_longer_was_measured() -> None:
    assert reach({128: 0.01, 256: 0.02}, 64) == Reach(256, longest_measured=True)


def test_two_groups_are_seen_and_one_group_is_not() -> None:
    assert two_groups([0.02, 0.03, 0.9, 0.95, 0.97])
    assert not two_groups([0.2, 0.3, 0.4, 0.5, 0.6])
    assert not two_groups([0.001, 0.002, 0.05, 0.051])  # apart, by less than matters
    assert not two_groups([0.1, 0.1, 0.1, 0.1, 0.9])  # one that lies apart is not a group
