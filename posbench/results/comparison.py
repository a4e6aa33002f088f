"""What a comparison on text or on a task says of each scheme, and the frame that is
made of it.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import pandas as pd

from posbench.estimate import Estimate, in_two_groups

Columns = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean in nats per token, with its 95 % interval and the seeds behind it. It is
    formatted as its mean.
    """

    mean: float
    low: float
    high: float
    seeds: tuple[float, ...]  # the mean of each

    @classmethod
    def of(cls, mean: Estimate) -> Self:
        return cls(mean.mean, mean.low(), mean.high(), mean.seeds)

    @property
    def half(self) -> float:
        return (self.high - self.low) / 2

    @property
    def in_groups(self) -> bool:
        """Whether the seeds fall into two groups."""
        return in_two_groups(self.seeds)

    def __float__(self) -> float:
        return self.mean

    def __format__(self, form: str) -> str:
        return format(self.mean, form)

    def columns(self, name: str) -> Columns:
        """Return columns of a frame: the mean has this name."""
        return {
            name: self.mean,
            f"{name}_low": self.low,
            f"{name}_high": self.high,
            f"{name}_min": min(self.seeds),
            f"{name}_max": max(self.seeds),
            f"{name}_groups": self.in_groups,
        }


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far a scheme is from the reference, with a word or why there is none."""

    interval: Interval | None = None  # None: no seed pairs
    # the interval for all comparisons of the report at once, which words go by
    adjusted_low: float = np.nan
    adjusted_high: float = np.nan
    word: str = ""
    why: str = ""

    def columns(self, name: str) -> Columns:
        columns: Columns = {f"{name}_word": self.word, f"{name}_why": self.why}
        if self.interval:
            difference = f"{name}_difference"
            columns |= self.interval.columns(difference)
            columns[f"{difference}_adjusted_low"] = self.adjusted_low
            columns[f"{difference}_adjusted_high"] = self.adjusted_high
        return columns


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    """What a scheme with a loss at the training length has without a reference."""

    nll: Interval  # at the training length
    nll_sd: float  # of seeds
    nll_text_error: float
    perplexity: float
    bits_per_byte: float
    learned: str | None  # yes, no, not resolved; None: not known
    beats_reader: str | None  # of its window
    readers: Mapping[str, float]  # the loss of each simple reader; nan: not known
    # by length as a multiple of the training length: what it adds, and if there is no
    # such number why
    rises: Mapping[float, Interval | None]
    rise_statuses: Mapping[float, str]
    # what the longest adds to the loss with narrowed attention
    above_windowed: Interval | None
    is_judged: bool  # whether the rest may be said
    holds_to: int | None = None  # tokens
    holds_at_longest: bool | None = None  # whether no longer length is known
    uses: int | None = None  # it uses more than so many tokens

    def columns(self) -> Columns:
        columns = self.nll.columns("nll")
        for name in ("nll_sd", "nll_text_error", "perplexity", "bits_per_byte"):
            columns[name] = getattr(self, name)
        columns |= {"learned": self.learned, "beats_reader": self.beats_reader}
        columns |= self.readers
        for ratio, rise in self.rises.items():
            name = f"rise_{ratio:g}x"
            columns[f"{name}_status"] = self.rise_statuses[ratio]
            if rise:
                columns |= rise.columns(name)
        if self.above_windowed:
            columns |= self.above_windowed.columns("above_windowed")
        if self.is_judged:
            for name in ("holds_to", "holds_at_longest", "uses"):
                columns[name] = getattr(self, name)
        return columns


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
    """A scheme of a comparison on text."""

    label: str
    facts: Mapping[str, Any]  # of its runs, by the names of the frame's columns
    seeds: int  # with a loss at the training length
    not_done: str  # what became of other runs
    tokens_per_second: float
    left_out: int  # seeds on other targets, or without a row at the training length
    nll_status: str  # ok, or why there is no loss
    numbers: Numbers | None = None  # None: no loss at the training length
    nll_difference: Difference | None = None  # from the reference, at 1x
    rise_difference: Difference | None = None  # at 4x

    def record(self) -> dict[str, Any]:
        """Return the scheme by field, for the cells of a table; with its numbers'
        fields, if there are any.
        """
        record = {**self.facts, **vars(self)}
        if self.numbers:
            record |= vars(self.numbers)
        return record

    def columns(self) -> Columns:
        columns = {"label": self.label, **self.facts}
        names = ("seeds", "not_done", "tokens_per_second", "left_out", "nll_status")
        for name in names:
            columns[name] = getattr(self, name)
        if self.numbers:
            columns |= self.numbers.columns()
        if self.nll_difference:
            columns |= self.nll_difference.columns("nll")
        if self.rise_difference:
            columns |= self.rise_difference.columns("rise")
        return columns


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """The schemes of one setting on text: the lowest loss first, those without a loss
    last.
    """

    reference: str | None  # the label of the scheme that others are compared with
    train_length: int
    ratios: list[float]  # of the longer lengths, to the training length
    silence: str  # why nothing may be said of other text; empty if it may
    schemes: list[Scheme]

    @property
    def measured(self) -> list[tuple[Scheme, Numbers]]:
        """The schemes with a loss at the training length, with their numbers."""
        measured = []
        for scheme in self.schemes:
            if scheme.numbers:
                measured.append((scheme, scheme.numbers))
        return measured

    @property
    def has_differences(self) -> bool:
        """Whether any scheme's loss pairs with the reference's."""
        for scheme in self.schemes:
            if scheme.nll_difference and scheme.nll_difference.interval:
                return True
        return False

    @property
    def readers(self) -> dict[str, float]:
        """The losses of the simple readers that are known: medians over schemes."""
        by_scheme = pd.DataFrame([numbers.readers for _, numbers in self.measured])
        known: dict[str, float] = by_scheme.median().dropna().to_dict()
        return known

    @property
    def records(self) -> pd.DataFrame:
        """The schemes by field, for a table."""
        return pd.DataFrame([scheme.record() for scheme in self.schemes])

    @functools.cached_property
    def frame(self) -> pd.DataFrame:
        """The comparison as columns of plain values, a row per scheme.

        `rise_2x`, ... is what so many training lengths add; `nll_difference` (1x) and
        `rise_difference` (4x) are from the reference. They have `_adjusted_low` and
        `_high`, and a `_word` or `_why` there is none. Means have `_low` and `_high`
        (95 %), `_min` and `_max` of seeds, `_groups` (seeds form two).
        """
        return pd.DataFrame([scheme.columns() for scheme in self.schemes])


@dataclasses.dataclass(frozen=True)
class Share:
    """The share of right tokens at a length of the problems: the median over all seeds,
    and the range.
    """

    median: float
    lowest: float
    highest: float
    status: str  # ok, or why there is none
    trivial: float  # the share of the trivial reader

    def columns(self, name: str) -> Columns:
        return {
            name: self.median,
            f"{name}_min": self.lowest,
            f"{name}_max": self.highest,
            f"{name}_status": self.status,
            f"{name}_trivial": self.trivial,
        }


@dataclasses.dataclass(frozen=True)
class ExactTest:
    """An exact test against the reference, adjusted for all tests of the table."""

    p: float
    difference: float
    word: str

    def columns(self, name: str) -> Columns:
        return {f"{name}_{column}": value for column, value in vars(self).items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskScheme:
    """A scheme of a comparison on a task."""

    label: str
    encoding: str
    seeds: int
    learned: int  # how many seeds did
    # the 95 % interval of the share that did, by Clopper & Pearson (1934)
    learned_low: float
    learned_high: float
    ranked: bool  # at least half learned
    steps_to_gate: float  # median
    # by length of the problems, in longest trained ones
    shares: Mapping[float, Share]
    accuracy_beyond: float  # mean over the lengths beyond the trained ones
    # a test that may not be made is missing
    learned_test: ExactTest | None = None
    tests: Mapping[float, ExactTest] = dataclasses.field(default_factory=dict)

    def columns(self) -> Columns:
        columns = dict(vars(self))
        for name in ("shares", "accuracy_beyond", "learned_test", "tests"):
            del columns[name]
        for ratio, share in self.shares.items():
            columns |= share.columns(f"accuracy_{ratio:.3g}x")
        columns["accuracy_beyond"] = self.accuracy_beyond
        if self.learned_test:
            columns |= self.learned_test.columns("learned")
        for ratio, test in self.tests.items():
            columns |= test.columns(f"accuracy_{ratio:g}x")
        return columns


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskComparison:
    """The schemes of one setting on a task: the most accurate beyond trained lengths
    first, those that have not learned last.
    """

    reference: str
    remarks: list[str]  # on the reference, if it is not the one asked for
    n_tests: int
    schemes: list[TaskScheme]

    @property
    def records(self) -> pd.DataFrame:
        """The schemes by field, for a table."""
        return pd.DataFrame([vars(scheme) for scheme in self.schemes])

    @functools.cached_property
    def frame(self) -> pd.DataFrame:
        """The comparison as columns of plain values, a row per scheme: `accuracy_1x`
        ..., and of each test, as `learned` or `accuracy_2x`, a `_p`, `_difference` and
        `_word`.
        """
        return pd.DataFrame([scheme.columns() for scheme in self.schemes])
