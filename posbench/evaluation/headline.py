"""The headline of a run: whether it has learned, nll at the training length, its rise beyond, and how far it holds.

All of it is of `fixed_target`, on the same target tokens at every length, without an extension, for the newest
checkpoint. A value that is missing or undefined is None. The headline of a run on a task is `answers.headline`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from posbench.config.external import AnyConfig
from posbench.config.schema import Config
from posbench.errors import UserError, did_you_mean
from posbench.evaluation import answers, intervals
from posbench.evaluation.intervals import Blocks, Interval, blocks_of
from posbench.run_folder.folder import load_any_config
from posbench.run_folder.rows import (
    PLAIN,
    BlockRow,
    BlocksKey,
    EvaluationRow,
    evaluation_blocks,
    evaluation_rows,
    newest_of_split,
    on_shared_targets,
)

REACH_LIMIT = 0.05  # nats per token above the loss at the training length
ALWAYS = (4, 16)  # training lengths whose rise is named even where it was not measured


Learned = Literal["yes", "no", "not resolved"]
Headline = dict[str, float | str | None]  # by name; only `learned` is a text


def headline(levels: "Levels", train_length: int) -> Headline:
    """Values of one run by name.

    `learned`: the gate, by `learned`. `nll_1x`, `nll_<r>x`: nats per token at r training lengths. `rise_<r>x`: that
    less `nll_1x`. `reach`: the longest context in tokens up to which the rise is at most `REACH_LIMIT`, by its
    one-sided upper 95 % bound over documents; None where the gate is known and not passed.
    """
    ratios = {length: f"{length / train_length:g}x" for kind, length in sorted(levels) if kind == PLAIN}
    longer = [length for length in ratios if length > train_length]
    gate = learned_of(levels, train_length)
    named: Headline = {"learned": gate, "nll_1x": None, **{f"rise_{ratio}x": None for ratio in ALWAYS}}
    nlls = {f"nll_{ratio}": _value(nll(levels, PLAIN, length)) for length, ratio in ratios.items()}
    rises = {length: rise(levels, PLAIN, length, train_length) for length in longer}
    risen = {f"rise_{ratios[length]}": _value(contrast) for length, contrast in rises.items()}
    upper = {length: _upper(contrast) for length, contrast in rises.items()}
    known = nlls.get("nll_1x") is not None and longer and may_claim(gate)
    return {**named, **nlls, **risen, "reach": reach(upper, train_length).length if known else None}


def headline_of(folder: Path) -> Headline:
    """The headline of a run folder; for a run on a task that of `answers.headline`.

    Raises:
        UserError: its files cannot be read as what they should be.
    """
    config, rows, blocks = load_any_config(folder), evaluation_rows(folder), evaluation_blocks(folder)
    if isinstance(config, Config) and config.data.task is not None:
        return answers.headline(answers.answers_of(folder, rows, blocks, config))
    return headline(levels_of(rows, blocks, config), config.training.train_length)


def objective(folder: Path, name: str | None) -> float | None:
    """The value that a sweeper gets: the headline value of that name, by default nll at the training length.

    The reach of a run that has not learned is 0: it must not win, and a sweeper needs a number.
    """
    found = headline_of(folder)
    value = found.get(name or "nll_1x")
    if name == "reach" and not may_claim(found["learned"]):
        return 0.0
    return None if isinstance(value, str) else value


def check_objective(config: Config) -> None:
    """Refuse an objective that the configured evaluation does not give.

    Raises:
        UserError: it is none of the headline's values at the configured ratios.
    """
    name, ratios = config.runtime.objective, [f"{ratio:.3g}x" for ratio in config.evaluation.ratios]
    if config.data.task is not None:
        known = [
            f"{value}_{ratio}" for value in ("accuracy", "exact_match") for ratio in {"1x": 0} | dict.fromkeys(ratios)
        ]
        known += ["nll_1x", "steps_to_gate"]
        if name is not None and name not in known:
            raise UserError(f"objective is '{name}'{did_you_mean(name, known)} (choices: {', '.join(known)})")
        return
    known = [f"{value}_{ratio}" for value in ("nll", "rise") for ratio in ratios if (value, ratio) != ("rise", "1x")]
    if name is not None and name not in [*known, "reach"]:
        raise UserError(f"objective is '{name}'{did_you_mean(name, known)} (choices: {', '.join(known)}, reach)")
    if name is not None and "fixed_target" not in config.evaluation.protocols:
        raise UserError(f"objective is '{name}', of fixed_target: it is not among evaluation.protocols")


# -- the gate ----------------------------------------------------------------------------------------------------------


def learned(difference: float | None, found: Interval | None) -> Learned | None:
    """Whether a model has learned: its nll at the training length is below that of a bigram model on the same targets.

    Args:
        difference: nll less that of the bigram model, nats per token; None: not known.
        found: its 95 % interval, paired by document. None, as for rows of earlier versions: the difference decides.

    Returns:
        `not resolved` where the interval contains 0; None where the difference is not known.
    """
    if difference is None:
        return None
    if found is None:
        return "yes" if difference < 0 else "no"
    return "yes" if found.high < 0 else "no" if found.low > 0 else "not resolved"


def may_claim(gate: object) -> bool:
    """Whether a reach or a verdict may be stated: it has learned, or the gate is not known (None)."""
    return gate in (None, "yes")


def learned_of(levels: "Levels", train_length: int) -> Learned | None:
    """The gate of one run, its interval over documents."""
    difference = above_bigram(levels, train_length)
    if difference is None:
        return None
    return learned(difference.value, intervals.over_text(difference.blocks) if difference.blocks else None)


def above_bigram(levels: "Levels", train_length: int) -> "Contrast | None":
    """nll at the training length less that of a bigram model on the same targets; None if either is not known."""
    level = levels.get((PLAIN, train_length))
    if level is None or level.nll is None or level.row.bigram_nll is None or level.status != "ok":
        return None
    return Contrast(level.nll - level.row.bigram_nll, weighted([(1, level.blocks), (-1, level.bigram)]))


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
    bigram: Blocks | None = None  # of the same blocks, the sums of a bigram model; rows of earlier versions: None

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


Levels = dict[tuple[str, int], Level]  # by kind of curve (plain, windowed, an extension) and length


def levels_of(rows: list[EvaluationRow], blocks: dict[BlocksKey, list[BlockRow]], config: AnyConfig) -> Levels:
    """The fixed_target levels on the split that the configuration names, of the newest checkpoint evaluated on it."""
    own = [row for row in rows if row.is_headline]
    return {
        (row.kind, row.length): _level(row, blocks.get(row.blocks_key, []))
        for row in on_shared_targets(newest_of_split(own, headline_split(rows, config)))
    }


def headline_split(rows: list[EvaluationRow], config: AnyConfig) -> str:
    """The text of the levels: the configured one, else another that was evaluated."""
    splits = {row.split for row in rows if row.is_headline or row.protocol == answers.PROTOCOL}
    return config.evaluation.split if config.evaluation.split in splits else min(splits, default="")


def _sums(blocks: list[BlockRow]) -> Blocks | None:
    """Sums by block; None if there are too few blocks for an interval, or one lacks its numbers."""
    found = blocks_of(blocks)
    usable = len(blocks) >= 2 and bool(np.isfinite(found.sums).all() and (found.counts > 0).all())
    return found if usable else None


def _level(row: EvaluationRow, blocks: list[BlockRow]) -> Level:
    of_bigram = [dataclasses.replace(block, nll_sum=block.bigram_sum) for block in blocks]
    return Level(row, _sums(blocks), _sums(of_bigram))


# -- contrasts of levels -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Contrast:
    """A weighted sum of one run's (or two paired runs') levels, also block by block where the blocks are known."""

    value: float  # nats per token
    blocks: Blocks | None

    def __sub__(self, other: "Contrast") -> "Contrast":
        return Contrast(self.value - other.value, weighted([(1, self.blocks), (-1, other.blocks)]))


def contrast(parts: Sequence[tuple[float, Level | None]]) -> Contrast | None:
    """The weighted sum of levels; None if one is missing or has no value, or if target tokens or precisions differ."""
    levels = [level for _, level in parts if level is not None and level.status == "ok"]
    if len(levels) < len(parts) or len({(level.targets, level.row.dtype) for level in levels}) != 1:
        return None
    weights = [weight for weight, _ in parts]
    value = sum(weight * level.nll for weight, level in zip(weights, levels, strict=True) if level.nll is not None)
    return Contrast(value, weighted([(w, level.blocks) for w, level in zip(weights, levels, strict=True)]))


def weighted(parts: Sequence[tuple[float, Blocks | None]]) -> Blocks | None:
    """The weighted sum of blocks; None if one is missing or of another text."""
    blocks = [part for _, part in parts if part is not None]
    if len(blocks) < len(parts) or not all(one.same_text(blocks[0]) for one in blocks):
        return None
    terms = [weight * one.sums for (weight, _), one in zip(parts, blocks, strict=True)]
    return dataclasses.replace(blocks[0], sums=np.sum(terms, axis=0))


def nll(levels: Levels, kind: str, length: int) -> Contrast | None:
    return contrast([(1, levels.get((kind, length)))])


def rise(levels: Levels, kind: str, length: int, train_length: int) -> Contrast | None:
    """NLL(C) - NLL(L): what more context than in training costs; below 0 it helps."""
    return contrast([(1, levels.get((kind, length))), (-1, levels.get((PLAIN, train_length)))])


# -- how far -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Reach:
    """The longest context, in tokens, up to which a scheme holds."""

    length: int
    longest_measured: bool  # nothing longer was measured: it may hold further


def reach(upper: Mapping[int, float | None], train_length: int, limit: float = REACH_LIMIT) -> Reach:
    """The largest length whose upper one-sided 95 % bound of NLL(C) - NLL(L) is at most `limit`, as all shorter ones.

    Args:
        upper: that bound for every measured length above the training length; None where the scheme is undefined.
    """
    held = train_length
    for length in sorted(upper):
        bound = upper[length]
        if bound is None or not bound <= limit:
            return Reach(held, longest_measured=False)
        held = length
    return Reach(held, longest_measured=True)
