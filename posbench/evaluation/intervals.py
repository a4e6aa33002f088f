"""95 % intervals of token-weighted means: over the documents of a text, over seeds, or over both at once.

The unit of text is the document, never a token and not a block: blocks of one document are alike, and intervals that
take them for independent cover far less than they say (tests/test_coverage.py, on the losses of trained models). Of
fewer than `FEW_DOCUMENTS` the units are segments: the separate stretches that were held out, or parts of the documents'
held-out ends. Then an interval speaks for these very documents.

What an interval conditions on is said by what it goes over:
- documents (or segments): one checkpoint, other text like this;
- seeds: this very text, other seeds;
- seeds and documents: other seeds on other text. Statements about schemes are of this kind.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from posbench.run_folder.rows import BlockRow

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Units = Literal["documents", "segments"]

FEW_DOCUMENTS = 8  # fewer are no units to go by
SEGMENTS = 16  # that the text of few documents is cut into, in all
ENOUGH_DOCUMENTS = 20  # effective number; fewer, or one with more than `LARGEST_SHARE` of the tokens: a warning
LARGEST_SHARE = 1 / 3


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean with its two-sided t-interval, of 95 %; in the unit of what was averaged, here nats per token."""

    mean: float
    error: float  # standard error
    df: float  # degrees of freedom of the error
    seeds: int
    units: int = 0  # of text; 0: the interval is for this very text
    kind: Units | None = None  # of those units
    each: tuple[float, ...] = ()  # the mean of every seed, where there are several
    text: tuple[float, float] = (0.0, 0.0)  # parts of the squared error: over units of text, and of what is left

    @property
    def over(self) -> str:
        """documents, seeds, seeds and documents ..."""
        text = [self.kind] if self.kind else []
        return " and ".join([*(["seeds"] if self.seeds > 1 else []), *text])

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    @property
    def half(self) -> float:
        """Half of the interval's width."""
        return self.half_at(0.05)

    @property
    def upper(self) -> float:
        """One-sided upper bound, of 95 %."""
        return self.mean + self.half_at(0.1)

    def half_at(self, level: float) -> float:
        """Half of the width of the two-sided interval that misses with this probability."""
        return _quantile(self.df, 1 - level / 2) * self.error if self.error else 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class Blocks:
    """Per block of text: sums of nll in nats (or of their differences), tokens, and the document it stands in."""

    sums: Floats
    counts: Floats
    documents: Integers
    stretches: Integers | None = None  # the held-out stretch of the document; None: all of a document's text is in one

    def same_text(self, other: "Blocks") -> bool:
        return np.array_equal(self.documents, other.documents) and np.array_equal(self.counts, other.counts)


def blocks_of(rows: Sequence[BlockRow]) -> Blocks:
    """Block rows as arrays, a number that a row lacks as NaN, a document that it lacks as -1."""
    stretches = [row.stretch for row in rows if row.stretch is not None]
    return Blocks(
        sums=np.array([row.nll_sum for row in rows], dtype=np.float64),
        counts=np.array([row.n_tokens for row in rows], dtype=np.float64),
        documents=np.array([-1 if row.document is None else row.document for row in rows], dtype=np.int64),
        stretches=np.array(stretches, dtype=np.int64) if rows and len(stretches) == len(rows) else None,
    )


@dataclasses.dataclass(frozen=True)
class Documents:
    """The number of documents behind a figure, and how evenly the tokens are spread over them."""

    number: int
    effective: float  # as many of equal size would be as good: (sum of tokens)^2 / sum of squares (Kish, 1965)
    largest: float  # share of the tokens in one document

    @property
    def told(self) -> str:
        """The number in words, with the effective one: `49 documents, effectively 45.2`."""
        return "1 document" if self.number == 1 else f"{self.number} documents, effectively {self.effective:.1f}"

    @property
    def warning(self) -> str | None:
        """A line for the reader if they are few, effectively, or one of them has much of the text."""
        if self.effective >= ENOUGH_DOCUMENTS and self.largest <= LARGEST_SHARE:
            return None
        if self.number == 1:
            said = "Only one document stands behind each figure"
        elif self.largest > LARGEST_SHARE:
            said = f"{self.largest:.0%} of the targets behind each figure stand in one of {self.told} of equal size"
        else:
            said = f"Only {self.told} of equal size, stand behind each figure"
        if self.few:
            return f"{said}: intervals are over segments of the text and speak for no other."
        return f"{said}: intervals are less certain than they say."

    @property
    def few(self) -> bool:
        return self.number < FEW_DOCUMENTS


def documents_of(blocks: Blocks) -> Documents:
    """The documents behind blocks."""
    tokens = np.bincount(np.unique(blocks.documents, return_inverse=True)[1], blocks.counts)
    tokens = tokens[tokens > 0]
    total = tokens.sum()
    return Documents(len(tokens), float(total**2 / (tokens**2).sum()), float(tokens.max() / total))


# -- intervals ---------------------------------------------------------------------------------------------------------


def over_text(blocks: Blocks) -> Interval | None:
    """Of one checkpoint's mean, `sums.sum() / counts.sum()`, or of a paired difference; None with less than two units.

    A t-interval over units of text of different sizes: the ratio of sums, linearised. Source: Cochran (1977),
    "Sampling Techniques", section 6.5, and section 9A.1 on whole clusters.
    """
    sums, counts, kind = by_unit([blocks])
    if len(counts) < 2:
        return None
    mean, residuals = _linearised(sums, counts)
    variance = float(residuals[0].var(ddof=1)) / len(counts)
    return Interval(mean, math.sqrt(variance), len(counts) - 1, 1, len(counts), kind)


def over_seeds(values: Sequence[float]) -> Interval:
    """Of a mean over seeds, one value each (for a comparison: the paired difference), on this very text.

    Raises:
        ValueError: fewer than two values.
    """
    if len(values) < 2:
        raise ValueError("an interval over seeds needs at least two of them")
    found = Interval(float(np.mean(values)), 0.0, 0.0, len(values), each=tuple(map(float, values)))
    return with_seed_variance(found, float(np.var(values, ddof=1)), len(values) - 1)


def over_seeds_and_text(each: Sequence[Blocks]) -> Interval | None:
    """Of a mean over seeds, for other seeds on other text; the blocks of every seed are those of the same text.

    Seeds and units of text are crossed random factors: the variance of the mean is that over seeds and that over units,
    less that of what is left, which both contain (Cameron, Gelbach & Miller, 2011, "Robust Inference With Multiway
    Clustering", section 2.1). Degrees of freedom: Satterthwaite (1946), as for readers and cases in Hillis (2007).

    Returns:
        None with less than two units.

    Raises:
        ValueError: fewer than two seeds, or blocks of different texts.
    """
    if len(each) < 2 or not all(one.same_text(each[0]) for one in each):
        raise ValueError("an interval over seeds and text needs two seeds or more on the same text")
    sums, counts, kind = by_unit(each)
    n_seeds, n_units = sums.shape
    if n_units < 2:
        return None
    mean, residuals = _linearised(sums, counts)
    of_seed, of_unit = residuals.mean(1), residuals.mean(0)
    left = residuals - of_seed[:, None] - of_unit + residuals.mean()
    units = float(of_unit.var(ddof=1)) / n_units
    both = float((left**2).sum()) / ((n_seeds - 1) * (n_units - 1)) / (n_seeds * n_units)
    values = tuple((mean + of_seed).tolist())
    found = Interval(mean, 0.0, 0.0, n_seeds, n_units, kind, each=values, text=(units, both))
    return with_seed_variance(found, float(of_seed.var(ddof=1)), n_seeds - 1)


def with_seed_variance(found: Interval, variance: float, df: float) -> Interval:
    """The interval over seeds, or seeds and text, if single seeds have this variance, known with `df`."""
    seeds, (units, both), df_units = variance / found.seeds, found.text, max(1, found.units - 1)
    total = max(seeds + units - both, seeds, units)
    spread = seeds**2 / df + units**2 / df_units
    df_of_error = total**2 / spread if spread else df
    return dataclasses.replace(found, error=math.sqrt(total), df=df_of_error)


def clopper_pearson(successes: int, trials: int) -> tuple[float, float]:
    """Of a share of independent trials: 95 % at least, whatever the share is.

    Source: Clopper & Pearson (1934), "The use of confidence or fiducial limits illustrated in the case of the
    binomial".

    Raises:
        ValueError: no trials, or more successes than those.
    """
    from scipy import special

    if not 0 <= successes <= trials or not trials:
        raise ValueError(f"{successes} of {trials} is no share")
    failures = trials - successes
    low = float(special.betaincinv(successes, failures + 1, 0.025)) if successes else 0.0
    high = float(special.betaincinv(successes + 1, failures, 0.975)) if failures else 1.0
    return low, high


def by_unit(each: Sequence[Blocks]) -> tuple[Floats, Floats, Units]:
    """(seeds, units) sums and (units,) tokens, and what a unit is: the documents, or segments of few of them."""
    counts = each[0].counts
    unit, kind = _units(each[0])
    *sums, tokens = (np.bincount(unit, values).astype(np.float64) for values in (*(one.sums for one in each), counts))
    return np.stack(sums), tokens, kind


def _units(text: Blocks) -> tuple[Integers, Units]:
    """The unit of each block, numbered from 0; blocks come in the order of the text."""
    documents, stretches = text.documents, text.stretches
    numbers, document, blocks = np.unique(documents, return_inverse=True, return_counts=True)
    if len(numbers) >= FEW_DOCUMENTS:
        return document, "documents"
    if stretches is not None and len(np.unique(stretches)) >= FEW_DOCUMENTS:
        return np.unique(stretches, return_inverse=True)[1], "segments"
    parts = np.maximum(1, np.round(SEGMENTS * blocks / len(documents)).astype(np.int64))
    parts = np.minimum(parts, blocks)
    place = np.empty(len(documents), np.int64)  # of a block in its document
    place[np.argsort(document, kind="stable")] = np.concatenate([np.arange(n) for n in blocks])
    return np.cumsum([0, *parts])[document] + place * parts[document] // blocks[document], "segments"


def _linearised(sums: Floats, counts: Floats) -> tuple[float, Floats]:
    """The token-weighted mean, and per seed and unit what it adds to it: residuals of mean 0, linear in the sums."""
    mean = float(sums.sum() / (len(sums) * counts.sum()))
    return mean, (sums - mean * counts) / counts.mean()


def _quantile(df: float, share: float) -> float:
    from scipy import special

    return float(special.stdtrit(df, share))
