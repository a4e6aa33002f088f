"""What joint intervals say of the schemes of a set: their words, how far they hold, and how much context they need.

An interval is over seeds and documents, of one checkpoint over documents alone.
"""

import dataclasses
import math
from collections.abc import Mapping

from posbench.evaluation import intervals, levels
from posbench.evaluation.intervals import Interval
from posbench.evaluation.levels import REACH_LIMIT, Contrast, weighted
from posbench.report.comparison import claims, statistics
from posbench.report.comparison.claims import LEAST, AtOne, Beyond, Bounds, Reach
from posbench.report.comparison.statistics import SEEDS_FOR_A_CLAIM

PerSeed = dict[int, Contrast]
Pair = tuple[PerSeed, PerSeed]  # differences from the reference: of nll at the training length, of the rise at 4x


@dataclasses.dataclass(frozen=True)
class SeedRange(Interval):
    """Of seeds that a t-interval misleads about: fewer than `SEEDS_FOR_A_CLAIM`, or in two groups.

    A seed that deviates makes such intervals miss far more often than they say (scripts/words.py seeds). So the lowest
    and the highest seed stand in place of a 95 % interval.
    """

    @property
    def low(self) -> float:
        return min(self.each)

    @property
    def high(self) -> float:
        return max(self.each)

    @property
    def half(self) -> float:
        return math.nan


def _shown(found: Interval | None) -> Interval | None:
    if found is None or len(found.each) < 2:
        return found
    few = len(found.each) < SEEDS_FOR_A_CLAIM or statistics.two_groups(found.each)
    return SeedRange(**vars(found)) if few else found


def interval(values: PerSeed) -> Interval | None:
    """The figures of a scheme, over seeds and documents; of one checkpoint, over documents.

    If the documents are unknown or differ between seeds, it is over seeds alone, on this very text.
    """
    return _shown(t_interval(values))


def t_interval(values: PerSeed) -> Interval | None:
    """The same, however few the seeds are: what words go by, where `interval` shows the range of seeds."""
    blocks = [one.blocks for one in values.values() if one.blocks is not None]
    if len(values) == 1:
        return intervals.over_text(blocks[0]) if blocks else None
    if len(blocks) == len(values) and all(one.same_text(blocks[0]) for one in blocks):
        found = intervals.over_seeds_and_text(blocks) if blocks else None
        if found:
            return found
    return intervals.over_seeds([one.value for one in values.values()]) if len(values) >= 2 else None


def seed_interval(values: PerSeed) -> Interval | None:
    """Over seeds, on this very text; None with one seed."""
    return _shown(intervals.over_seeds([one.value for one in values.values()])) if len(values) >= 2 else None


def text_interval(values: PerSeed) -> Interval | None:
    """Over documents, for these very checkpoints; None where the blocks of one are unknown or of another text."""
    blocks = weighted([(1 / len(values), one.blocks) for one in values.values()]) if values else None
    return None if blocks is None else intervals.over_text(blocks)


# -- words ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Judged:
    """What joint intervals say of the schemes of a set, by label."""

    at_one: dict[str, Bounds]
    beyond: dict[str, Bounds]
    words: dict[str, tuple[AtOne, Beyond]]
    reach: dict[str, Reach]
    uses: dict[str, int | None]


def judge(
    pairs: Mapping[str, Pair],
    rises: Mapping[str, Mapping[int, PerSeed | None]],
    train_length: int,
    least: float = LEAST,
    schemes: int = 0,
) -> Judged:
    """The words of a set of schemes.

    Args:
        pairs: by label, of the schemes that are compared with the reference and have enough seeds.
        rises: by label and length but the training length, of every scheme; empty where the scheme is undefined, None
            where the loss is not finite.
        schemes: number that the sweep named, with the reference; it counts if it is more than there are here.
    """
    schemes = max(schemes, len(rises))
    lengths = sorted({length for each in rises.values() for length in each})
    # Two differences of each from the reference, and of each its rises at longer lengths and at shorter ones.
    intervals_of_all = 2 * (schemes - 1) + schemes * len({length > train_length for length in lengths})
    level = claims.level(intervals_of_all)

    def joint(found: Mapping[str, Interval]) -> dict[str, Bounds]:
        return {label: claims.bounds(one, level) for label, one in found.items()}

    of_nll = moderated({label: pair[0] for label, pair in pairs.items()})
    of_rise = moderated({label: pair[1] for label, pair in pairs.items()})
    at_one, beyond = joint(of_nll), joint(of_rise)
    words = {
        label: (claims.at_one(at_one[label], least), claims.beyond(beyond[label], least))
        for label in pairs
        if label in at_one and label in beyond
    }
    by_length = {
        length: joint(moderated({label: each.get(length) or {} for label, each in rises.items()})) for length in lengths
    }
    unknown = Bounds(-math.inf, math.inf)  # there are values, but nothing to tell their error by
    rise_of = {
        label: {n: None if values == {} else by_length[n].get(label, unknown) for n, values in each.items()}
        for label, each in rises.items()
    }
    reach = {
        label: claims.reach({n: found for n, found in each.items() if n > train_length}, train_length, REACH_LIMIT)
        for label, each in rise_of.items()
    }
    shorter = {
        label: {n: found.high if found else None for n, found in each.items() if n < train_length}
        for label, each in rise_of.items()
    }
    uses = {label: levels.uses(each, train_length) for label, each in shorter.items()}
    return Judged(at_one, beyond, words, reach, uses)


def moderated(values: Mapping[str, PerSeed]) -> dict[str, Interval]:
    """By label, `of_claim` of one figure with the variance over seeds moderated by that of all (`claims.moderated`).

    A scheme with seeds in two groups goes by its own variance.
    """
    found = {label: one for label, each in values.items() if (one := of_claim(each)) is not None}
    apart = {label for label, each in values.items() if in_two_groups(each)}
    return found | claims.moderated({label: one for label, one in found.items() if label not in apart})


def of_claim(values: PerSeed) -> Interval | None:
    """Over seeds and documents; of fewer than `SEEDS_FOR_A_CLAIM` over documents, for these very checkpoints."""
    return t_interval(values) if len(values) >= SEEDS_FOR_A_CLAIM else text_interval(values)


def in_two_groups(values: PerSeed) -> bool:
    return statistics.two_groups([one.value for one in values.values()])
