"""Means with their errors over units of text, over seeds, or over both at once.

The unit of text is the document, never a token and not a block: blocks of one document
are alike, and intervals that take them for independent have too low a coverage
(tests/test_intervals.py, on losses of trained models).
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

FEW_DOCUMENTS = 8  # fewer documents are too few units: their text is cut into segments
SEGMENTS = 16  # of all documents together
MANY_SEEDS = 10  # so many show how they are spread
LEAST_GAP = 0.1  # nats per token, between two groups of seeds


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean with its standard error and degrees of freedom."""

    mean: float
    error: float  # nan if it cannot be estimated
    df: float
    seeds: tuple[float, ...] = ()  # the mean of each seed
    units: int = 0  # units of text behind the interval; 0: it holds for this text alone
    of_seeds: float = 0.0  # the part of the variance over seeds; the rest is over units

    def half(self, alpha: float = 0.05) -> float:
        """Return half of the interval that misses with probability alpha.

        Below 5 % an interval over seeds and units has the quantiles of both, weighted
        by variance (Cochran & Cox, 1950, "Experimental Designs", section 4.14). With
        Satterthwaite's degrees of freedom one of .2 % would miss in .6 % of cases,
        where seeds vary as much as documents.
        """
        from scipy import special

        if self.error == 0:
            return 0.0
        level = 1 - alpha / 2
        quantile = float(special.stdtrit(self.df, level))
        if alpha < 0.05 and len(self.seeds) > 1 and self.units > 1:
            over_seeds = float(special.stdtrit(len(self.seeds) - 1, level))
            over_units = float(special.stdtrit(self.units - 1, level))
            quantile = over_units + self.of_seeds * (over_seeds - over_units)
        return quantile * self.error

    def low(self, alpha: float = 0.05) -> float:
        return self.mean - self.half(alpha)

    def high(self, alpha: float = 0.05) -> float:
        return self.mean + self.half(alpha)


def estimate(sums: Floats | Integers, tokens: Floats | Integers) -> Estimate:
    """Estimate the mean of sums (seeds, units) over tokens (units,).

    The interval is for other seeds on other text like this. Seeds and units of text are
    crossed random factors. The variance of the mean is that over seeds plus that over
    units less that of the interaction, which both contain (Cameron, Gelbach & Miller,
    2011, "Robust Inference With Multiway Clustering", section 2.1). All are of the
    linearised ratio of sums (Cochran, 1977, "Sampling Techniques", section 6.5).
    Degrees of freedom: Satterthwaite (1946); `Estimate.half` says where not.

    With one seed the interval is over units, for that checkpoint alone. With one unit
    it is over seeds, for this text alone. With one of each there is none.
    """
    n_seeds, n_units = sums.shape
    mean = float(sums.sum() / (n_seeds * tokens.sum()))
    residuals = (sums - mean * tokens) / tokens.mean()  # (seeds, units)
    by_seed = residuals.mean(axis=1)
    by_unit = residuals.mean(axis=0)
    seeds = tuple((mean + by_seed).tolist())

    over_seeds = _variance_of_mean(by_seed)
    over_units = _variance_of_mean(by_unit)
    if n_seeds == 1:
        df = max(1, n_units - 1)
        return Estimate(mean, math.sqrt(over_units), df, seeds, n_units)
    if n_units == 1:
        return Estimate(mean, math.sqrt(over_seeds), n_seeds - 1, seeds)

    interaction = residuals - by_seed[:, None] - by_unit
    interaction_df = (n_seeds - 1) * (n_units - 1)
    in_both = float((interaction**2).sum()) / (interaction_df * n_seeds * n_units)
    variance = max(over_seeds + over_units - in_both, over_seeds, over_units)

    spread = over_seeds**2 / (n_seeds - 1) + over_units**2 / (n_units - 1)
    df = variance**2 / spread if spread else n_seeds - 1
    of_seeds = over_seeds / (over_seeds + over_units) if spread else 1.0
    return Estimate(mean, math.sqrt(variance), df, seeds, n_units, of_seeds)


def _variance_of_mean(values: Floats) -> float:
    if len(values) == 1:
        return math.nan
    return float(values.var(ddof=1)) / len(values)


def in_two_groups(values: Sequence[float]) -> bool:
    """Return whether ten or more seeds fall into two groups, or one lies apart.

    A mean and its interval would hide that. The widest gap must be half of the range
    or, with one value on a side, twice the range of the rest. This is a hint, not a
    test: 1 of 100 sets of ten normal values meets it. Of five 1 in 4 would, so that
    nothing is said of fewer than ten.
    """
    if len(values) < MANY_SEEDS:
        return False
    gaps = np.diff(np.sort(values))
    span = max(values) - min(values)
    outermost = max(gaps[0], gaps[-1])
    if outermost >= max(LEAST_GAP, 2 / 3 * span):
        return True
    return bool(gaps[1:-1].max() >= max(LEAST_GAP, span / 2))


def units_of_text(documents: Integers, stretches: Integers | None) -> Integers:
    """Return the number of each block's unit of text, from 0 on.

    Units are documents. Where there are fewer than `FEW_DOCUMENTS`, they are segments:
    the separate stretches that were held out (None: documents are in one piece), or
    parts of the documents. Intervals over segments speak for these very documents.
    """
    names, document, n_blocks = np.unique(
        documents, return_inverse=True, return_counts=True
    )
    if len(names) >= FEW_DOCUMENTS:
        return document
    if stretches is not None:
        numbers, stretch = np.unique(stretches, return_inverse=True)
        if len(numbers) >= FEW_DOCUMENTS:
            return stretch

    # Each document is cut into segments by its share of the blocks, at least one.
    share = np.round(SEGMENTS * n_blocks / len(documents)).astype(np.int64)
    n_segments = np.clip(share, 1, n_blocks)
    first_segment = np.cumsum(n_segments) - n_segments

    units = np.empty(len(documents), np.int64)
    for number in range(len(names)):
        blocks = np.flatnonzero(document == number)
        place = np.arange(len(blocks))
        segment = place * n_segments[number] // len(blocks)
        units[blocks] = first_segment[number] + segment
    return units
