"""What a comparison needs beside intervals: adjusted p-values, planning, uneven outcomes."""

import itertools
import math
from collections.abc import Sequence

import numpy as np

SEEDS_FOR_A_CLAIM = 5  # fewer give intervals, too, and they are marked


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


# -- planning ----------------------------------------------------------------------------------------------------------


def needed(sd: float, difference: float) -> int:
    """Seeds, or documents, to find a difference with 80 % power at the 5 % level, by a two-sided t-test.

    n = ((t(.975) + t(.80)) sd / difference)^2 with n - 1 degrees of freedom; `sd` is that of one seed's, or of one
    document's, value of what is tested: of a paired difference, that of the differences.
    """
    from scipy import special

    n = max(2, math.floor((2.8 * sd / difference) ** 2))  # z(.975) + z(.80) = 2.8
    while n < ((special.stdtrit(n - 1, 0.975) + special.stdtrit(n - 1, 0.80)) * sd / difference) ** 2:
        n += 1
    return n


# -- how uneven --------------------------------------------------------------------------------------------------------


def two_groups(values: Sequence[float], least_gap: float = 0.1) -> bool:
    """Whether a mean would hide that outcomes fall into two groups; points are then shown instead.

    The criterion: the widest gap between neighbours is at least half of the range and at least `least_gap`, with two
    values or more on either side. It asks for a look at the points and is no test: five normal values whose spread
    is large beside `least_gap` meet it one time in six, ten values one in a hundred.
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    if len(ordered) < 4:
        return False
    gaps = np.diff(ordered)
    widest = int(gaps[1:-1].argmax()) + 1  # two values on either side
    return bool(gaps[widest] >= max(least_gap, 0.5 * (ordered[-1] - ordered[0])))
