"""Intervals for token-weighted means over blocks of text.

A block is the unit that is resampled, never a token: neighbouring tokens are not independent. These intervals speak
for one trained checkpoint; what holds for a scheme needs several seeds.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def block_bootstrap(sums: Floats, counts: Floats, samples: int, seed: int = 0) -> tuple[float, float]:
    """95 % percentile interval of `sums.sum() / counts.sum()` over resampled blocks.

    Args:
        sums: per block, e.g. the sum of nll in nats; for a paired difference, the difference of two such sums.
        counts: per block, the number of tokens.
        samples: bootstrap resamples.
    """
    draws = np.random.default_rng(seed).integers(len(sums), size=(samples, len(sums)))
    means = sums[draws].sum(1) / counts[draws].sum(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)
