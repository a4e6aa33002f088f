"""The results of a run on text: whether it has learned, nll at the training length, its rise, how much context it uses.

All of it is of `fixed_target`, on the same target tokens at every length, without an extension, for the newest
checkpoint. A value that is missing or undefined is None. `answers` has the results of a run on a task.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from posbench.config.external import AnyConfig
from posbench.evaluation import intervals
from posbench.evaluation.intervals import Blocks, Interval, blocks_of
from posbench.evaluation.measure import Headline, Learned, Measure
from posbench.run_folder.rows import (
    PLAIN,
    BlockRow,
    BlocksKey,
    EvaluationRow,
    evaluation_blocks,
    headline_split,
    newest_of_split,
    on_shared_targets,
)

REACH_LIMIT = 0.05  # nats per token above the loss at the training length
USES_LIMIT = 0.02  # the same, for what less context costs
ALWAYS = (4, 16)  # training lengths whose rise is named even where it was not measured


@dataclasses.dataclass(frozen=True, eq=False)
class Levels(Measure):
    """The levels of a run on text by kind of curve (plain, windowed, an extension) and length in tokens."""

    at: dict[tuple[str, int], "Level"]
    train_length: int
    # By tokens trained on, the newest among them; empty where only that was measured, or by an earlier version.
    on_the_way: Mapping[int, "Levels"] = dataclasses.field(default_factory=dict)

    protocol: ClassVar = "fixed_target"
    main: ClassVar = ("learned", "nll_1x", "rise_4x", "rise_16x", "reach", "uses")  # of the headline
    columns: ClassVar = (  # of rows: those that come first in a table
        "protocol", "length", "length_ratio", "nll", "ci_low", "ci_high", "learned", "perplexity", "extension",
        "status",
    )  # fmt: skip

    @classmethod
    def of(cls, folder: Path, config: AnyConfig, rows: Sequence[EvaluationRow]) -> "Levels":
        blocks = evaluation_blocks(folder)
        by_tokens: dict[int, list[EvaluationRow]] = {}
        for row in rows:
            if row.tokens is not None:
                by_tokens.setdefault(row.tokens, []).append(row)
        made = {tokens: cls.with_blocks(blocks, config, own) for tokens, own in by_tokens.items()}
        return dataclasses.replace(cls.with_blocks(blocks, config, rows), on_the_way=made if len(made) > 1 else {})

    @classmethod
    def with_blocks(
        cls, blocks: Mapping[BlocksKey, list[BlockRow]], config: AnyConfig, rows: Sequence[EvaluationRow]
    ) -> "Levels":
        """Those of the newest checkpoint, of blocks that have been read."""
        own = [row for row in rows if row.is_headline and row.protocol == cls.protocol]
        joined = on_shared_targets(newest_of_split(own, headline_split(own, config.evaluation.split)))
        at = {(row.kind, row.length): _level(row, blocks.get(row.blocks_key, [])) for row in joined}
        return cls(at, config.training.train_length)

    @staticmethod
    def order(row: EvaluationRow) -> tuple[Any, ...]:
        """fixed_target as trained first, then narrowed or extended, then the rest."""
        return not row.is_headline, row.curve_name != "fixed_target", row.curve_name, row.length

    @property
    def learned(self) -> Learned | None:
        """The gate, by `learned`, its interval over documents."""
        difference = self.above_ngram
        if difference is None:
            return None
        return learned(difference.value, intervals.over_text(difference.blocks) if difference.blocks else None)

    @property
    def headline(self) -> Headline:
        """Values of the run by name.

        `learned`: the gate. `nll_1x`, `nll_<r>x`: nats per token at r training lengths. `rise_<r>x`: that less
        `nll_1x`. `reach`: the longest context in tokens up to which the rise is at most `REACH_LIMIT`, by its
        one-sided upper 95 % bound over documents; `uses`: the shortest context in tokens whose nll is within
        `USES_LIMIT` of `nll_1x`, by the same bound. Both are None where the gate is known and not passed.
        """
        ratios = {length: f"{length / self.train_length:g}x" for kind, length in sorted(self.at) if kind == PLAIN}
        longer, shorter = ([n for n in ratios if n > self.train_length], [n for n in ratios if n < self.train_length])
        gate = self.learned
        named: Headline = {"learned": gate, "nll_1x": None, **{f"rise_{ratio}x": None for ratio in ALWAYS}}
        nlls = {f"nll_{ratio}": _value(self.nll(PLAIN, length)) for length, ratio in ratios.items()}
        rises = {length: self.rise(PLAIN, length) for length in longer}
        risen = {f"rise_{ratios[length]}": _value(contrast) for length, contrast in rises.items()}
        upper = {length: _upper(contrast) for length, contrast in rises.items()}
        lost = {length: _upper(self.rise(PLAIN, length)) for length in shorter}
        known = nlls.get("nll_1x") is not None and may_claim(gate)
        held = reach(upper, self.train_length) if known and longer else None
        return {**named, **nlls, **risen, "reach": held, "uses": uses(lost, self.train_length) if known else None}

    @property
    def at_one(self) -> "Level | None":
        """The level at the training length."""
        return self.at.get((PLAIN, self.train_length))

    @property
    def above_ngram(self) -> "Contrast | None":
        """nll at the training length less the best n-gram model's on the same targets; None if one is not known."""
        level = self.at_one
        if level is None or level.nll is None or level.row.ngram_nll is None or level.status != "ok":
            return None
        return Contrast(level.nll - level.row.ngram_nll, weighted([(1, level.blocks), (-1, level.ngram)]))

    def nll(self, kind: str, length: int) -> "Contrast | None":
        """nll at a length, which may be undefined."""
        return self.contrast((1, kind, length))

    def rise(self, kind: str, length: int) -> "Contrast | None":
        """NLL(C) - NLL(L): what more context than in training costs; below 0 it helps."""
        return self.contrast((1, kind, length), (-1, PLAIN, self.train_length))

    def contrast(self, *parts: tuple[float, str, int]) -> "Contrast | None":
        """The sum of levels, each a weight, a kind and a length.

        Returns:
            None if a level is missing or has no value, or if their target tokens or precisions differ.
        """
        found = [(weight, self.at.get((kind, length))) for weight, kind, length in parts]
        levels = [(weight, level) for weight, level in found if level is not None and level.status == "ok"]
        if len(levels) < len(parts) or len({(level.targets, level.row.dtype) for _, level in levels}) != 1:
            return None
        value = sum(weight * level.nll for weight, level in levels if level.nll is not None)
        return Contrast(value, weighted([(weight, level.blocks) for weight, level in levels]))


# -- the gate ----------------------------------------------------------------------------------------------------------


def learned(difference: float, found: Interval | None) -> Learned:
    """Whether a model has learned: at the training length it beats the best n-gram model on the same targets.

    Args:
        difference: nll less that of the n-gram model, nats per token.
        found: its 95 % interval, paired by document. None, as for rows of earlier versions: the difference decides.

    Returns:
        `not resolved` where the interval contains 0.
    """
    if found is None:
        return "yes" if difference < 0 else "no"
    return "yes" if found.high < 0 else "no" if found.low > 0 else "not resolved"


def may_claim(gate: object) -> bool:
    """Whether a reach or a verdict may be stated: it has learned, or the gate is not known (None)."""
    return gate in (None, "yes")


# -- values ------------------------------------------------------------------------------------------------------------


def _value(contrast: "Contrast | None") -> float | None:
    return None if contrast is None else contrast.value


def _upper(contrast: "Contrast | None") -> float | None:
    over_text = intervals.over_text(contrast.blocks) if contrast and contrast.blocks else None
    return over_text.upper if over_text else None


# -- levels ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Level:
    """A row of the headline protocol, fixed_target, and its blocks."""

    row: EvaluationRow
    blocks: Blocks | None  # None where the file lacks them
    ngram: Blocks | None = None  # of the same blocks, the sums of the n-gram model; rows of earlier versions: None

    @property
    def status(self) -> str:
        """The row's status; `failed` if its nll was not finite (null in the file)."""
        return "failed" if self.row.status == "ok" and not self.row.measured else self.row.status

    @property
    def nll(self) -> float | None:
        return self.row.nll

    @property
    def targets(self) -> str:
        """Identity of the scored tokens: levels that share it are paired."""
        return str(self.row.targets_sha256)


def _sums(blocks: Sequence[BlockRow]) -> Blocks | None:
    """Sums by block; None if there are too few blocks for an interval, or one lacks its numbers."""
    found = blocks_of(blocks)
    whole = np.isfinite(found.sums).all() and (found.counts > 0).all() and (found.documents >= 0).all()
    return found if len(blocks) >= 2 and whole else None


def _level(row: EvaluationRow, blocks: Sequence[BlockRow]) -> Level:
    of_ngram = [dataclasses.replace(block, nll_sum=block.ngram_sum) for block in blocks]
    return Level(row, _sums(blocks), _sums(of_ngram))


# -- contrasts of levels -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Contrast:
    """A weighted sum of one run's (or two paired runs') levels, also block by block where the blocks are known."""

    value: float  # nats per token
    blocks: Blocks | None

    def __sub__(self, other: "Contrast") -> "Contrast":
        return Contrast(self.value - other.value, weighted([(1, self.blocks), (-1, other.blocks)]))


def weighted(parts: Sequence[tuple[float, Blocks | None]]) -> Blocks | None:
    """The weighted sum of blocks; None if one is missing or of another text."""
    blocks = [part for _, part in parts if part is not None]
    if len(blocks) < len(parts) or not all(one.same_text(blocks[0]) for one in blocks):
        return None
    terms = [weight * one.sums for (weight, _), one in zip(parts, blocks, strict=True)]
    return dataclasses.replace(blocks[0], sums=np.sum(terms, axis=0))


# -- how far -----------------------------------------------------------------------------------------------------------


def reach(upper: Mapping[int, float | None], train_length: int) -> int:
    """The longest context, in tokens, up to which a scheme holds.

    It is the largest length whose upper one-sided 95 % bound of NLL(C) - NLL(L) is at most `REACH_LIMIT`, as all
    shorter ones.

    Args:
        upper: that bound for every measured length above the training length; None where the scheme is undefined.
    """
    return _last_within(upper, sorted(upper), REACH_LIMIT) or train_length


def uses(upper: Mapping[int, float | None], train_length: int) -> int | None:
    """The shortest context, in tokens, that costs a run no more than `USES_LIMIT`.

    It is the smallest length whose upper one-sided 95 % bound of NLL(C) - NLL(L) is at most that, as all longer ones.

    Args:
        upper: that bound for every measured length below the training length L.

    Returns:
        None if no shorter length was measured.
    """
    return (_last_within(upper, sorted(upper, reverse=True), USES_LIMIT) or train_length) if upper else None


def _last_within(upper: Mapping[int, float | None], lengths: list[int], limit: float) -> int | None:
    """The last of the lengths before the first whose bound is unknown or above the limit; None if that is the first."""
    last = None
    for length in lengths:
        bound = upper[length]
        if bound is None or not bound <= limit:  # a bound may be nan
            break
        last = length
    return last
