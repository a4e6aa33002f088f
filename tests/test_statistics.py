import numpy as np

from posbench.statistics import block_bootstrap


def test_block_bootstrap_covers_the_true_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(400):
        counts = rng.integers(20, 40, size=60).astype(float)
        sums = counts * (3.0 + rng.normal(0, 0.5, size=60))
        low, high = block_bootstrap(sums, counts, samples=500, seed=trial)
        hits += low <= 3.0 <= high
    # 95 % nominal; percentile intervals over 60 blocks run slightly short. Two standard errors of 400 trials are 2.2 %.
    assert 0.91 <= hits / 400 <= 0.98


def test_block_bootstrap_of_equal_blocks_has_no_width() -> None:
    low, high = block_bootstrap(np.full(10, 6.0), np.full(10, 2.0), samples=100)
    assert low == high == 3.0
