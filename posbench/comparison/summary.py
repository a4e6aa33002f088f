"""What a report says of each scheme: every figure is a contrast of levels, paired by seed and by block of text.

With two seeds or more an interval is a t-interval over per-seed values; with one it is a block bootstrap and speaks for
that checkpoint only. Two endpoints per scheme against `rope` are primary: nll at the training length (equivalence) and
the rise of nll at 4x. All else is exploratory.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from posbench.comparison.load import Blocks, Group, Level, RunData, Scheme
from posbench.evaluation import statistics
from posbench.evaluation.statistics import SEEDS_FOR_A_CLAIM, Interval, Reach
from posbench.runs.rows import PLAIN, WINDOWED

MARGIN = 0.03  # nats per token: nll at 1x within it is called equivalent
NOT_WORSE = 0.05  # a scheme whose nll at 1x may be worse by more than this does not count as extrapolating
ENDPOINT_RATIO = 4
WISHED = 0.02  # nats per token: the difference that the planning figures are for
ALPHA = 0.05


@dataclasses.dataclass(frozen=True)
class Contrast:
    """A weighted sum of one run's (or two paired runs') levels, also block by block where the blocks are known."""

    value: float  # nats per token
    blocks: Blocks | None

    def __sub__(self, other: "Contrast") -> "Contrast":
        return Contrast(self.value - other.value, _weighted([(1, self.blocks), (-1, other.blocks)]))


def contrast(parts: Sequence[tuple[float, Level | None]]) -> Contrast | None:
    """The weighted sum of levels; None if one is missing or has no value, or if their target tokens differ."""
    levels = [level for _, level in parts if level is not None and level.status == "ok"]
    if len(levels) < len(parts) or len({level.targets for level in levels}) != 1:
        return None
    weights = [weight for weight, _ in parts]
    value = sum(weight * level.nll for weight, level in zip(weights, levels, strict=True) if level.nll is not None)
    return Contrast(value, _weighted([(w, level.blocks) for w, level in zip(weights, levels, strict=True)]))


def _weighted(parts: Sequence[tuple[float, Blocks | None]]) -> Blocks | None:
    blocks = [part for _, part in parts if part is not None]
    if len(blocks) < len(parts) or not all(np.array_equal(one.counts, blocks[0].counts) for one in blocks):
        return None
    terms = [weight * one.sums for (weight, _), one in zip(parts, blocks, strict=True)]
    return Blocks(np.sum(terms, axis=0), blocks[0].counts)


PerSeed = dict[int, Contrast]
Measure = Callable[[RunData], Contrast | None]


def per_seed(scheme: Scheme, measure: Measure) -> PerSeed:
    """A measure of every run that ended well and has it."""
    found = {seed: measure(run) for seed, run in scheme.by_seed.items()}
    return {seed: value for seed, value in found.items() if value is not None}


def interval(values: PerSeed) -> Interval | None:
    """Over seeds if there are two or more, else over the one checkpoint's blocks; None if there is nothing to say."""
    contrasts = list(values.values())
    if len(contrasts) >= 2:
        return statistics.t_interval([one.value for one in contrasts])
    return block_interval(contrasts[0]) if contrasts else None


def block_interval(one: Contrast) -> Interval | None:
    """Over the blocks of one checkpoint, if they are known."""
    return None if one.blocks is None else statistics.block_interval(one.blocks.sums, one.blocks.counts)


# -- measures ----------------------------------------------------------------------------------------------------------


def nll(kind: str, length: int) -> Measure:
    return lambda run: contrast([(1, run.levels.get((kind, length)))])


def rise(kind: str, length: int) -> Measure:
    """NLL(C) - NLL(L): what more context than in training costs; below 0 it helps."""
    return lambda run: contrast(
        [(1, run.levels.get((kind, length))), (-1, run.levels.get((PLAIN, run.config.training.train_length)))]
    )


def above_windowed(length: int) -> Measure:
    """NLL(C) less that of the same model with attention narrowed to the training length."""
    return lambda run: contrast([(1, run.levels.get((PLAIN, length))), (-1, run.levels.get((WINDOWED, length)))])


def against_plain(kind: str, length: int) -> Measure:
    """What an extension changes at a length; below 0 it helps."""
    return lambda run: contrast([(1, run.levels.get((kind, length))), (-1, run.levels.get((PLAIN, length)))])


def slope(lengths: Sequence[int]) -> Measure:
    """Least-squares slope of nll per doubling of context, over these lengths."""
    x = np.log2(np.array(lengths, dtype=np.float64))
    weights = (x - x.mean()) / ((x - x.mean()) ** 2).sum()
    return lambda run: contrast([(w, run.levels.get((PLAIN, c))) for w, c in zip(weights, lengths, strict=True)])


def unseen(lengths: Sequence[int]) -> Measure:
    """Mean nll over lengths beyond the training length only."""
    return lambda run: contrast([(1 / len(lengths), run.levels.get((PLAIN, length))) for length in lengths])


# -- summaries ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Point:
    """A scheme at one context length."""

    length: int
    ratio: float
    status: str  # ok, undefined, too_short, failed, or missing
    nll: float | None  # mean over seeds
    band: Interval | None  # of nll, over seeds; None for a single checkpoint, whose blocks say nothing about it
    rise: Interval | None
    levels: dict[int, float]  # nll per seed
    rises: dict[int, float]  # per seed


@dataclasses.dataclass(frozen=True)
class Curve:
    kind: str  # plain, windowed, or an extension
    points: list[Point]

    def at(self, length: int) -> Point | None:
        return next((point for point in self.points if point.length == length), None)


@dataclasses.dataclass(frozen=True)
class Endpoints:
    """A scheme against the reference, paired by seed. p-values are adjusted over the schemes (Holm), per endpoint."""

    nll: Interval | None  # difference of nll at the training length
    rise: Interval | None  # difference of the rise at 4x
    equivalence_p: float | None
    rise_p: float | None
    not_worse: bool | None  # upper one-sided 95 % bound of the nll difference is below NOT_WORSE
    verdict: str


@dataclasses.dataclass(frozen=True)
class Summary:
    """Everything that the tables and pictures show of one scheme."""

    scheme: Scheme
    outcomes: dict[str, int]  # done, diverged, oom ... -> runs
    curves: list[Curve]  # the plain one first
    nll: Interval | None  # at the training length
    nll_se_block: float | None
    bits_per_byte: float | None
    reach: Reach | None
    reach_over: str  # seeds or blocks
    rise_sd_seed: float | None  # of the rise at 4x
    rise_sd_block: float | None  # of one block
    rise_se_block: float | None
    slope: Interval | None
    unseen: Interval | None
    gain: Interval | None  # NLL(L) - NLL(longest)
    above_windowed: Interval | None  # at the longest
    bimodal: bool
    relative_speed: float | None
    endpoints: Endpoints | None = None

    @property
    def plain(self) -> Curve:
        return self.curves[0]

    @property
    def n_done(self) -> int:
        return self.outcomes.get("done", 0)

    @property
    def tokens_per_second(self) -> float | None:
        return speed(self.scheme)


def summarise(group: Group) -> list[Summary]:
    """One summary per scheme, the one that rises least at the longest length first."""
    lengths = sorted({length for run in group.runs for kind, length in run.levels if kind == PLAIN})
    none = next((scheme for scheme in group.schemes if scheme.name == "none"), None)
    found = [_summary(scheme, lengths, group.train_length, none) for scheme in group.schemes]
    verdicts = endpoints(group)
    return [dataclasses.replace(one, endpoints=verdicts.get(one.scheme.label)) for one in sorted(found, key=_rank)]


def _summary(scheme: Scheme, lengths: list[int], train_length: int, none: Scheme | None) -> Summary:
    longer = [length for length in lengths if length > train_length]
    kinds = sorted({kind for run in scheme.by_seed.values() for kind, _ in run.levels} - {PLAIN})
    curves = [_curve(scheme, kind, lengths, train_length) for kind in (PLAIN, *kinds)]
    base = per_seed(scheme, nll(PLAIN, train_length))
    at_four = per_seed(scheme, rise(PLAIN, ENDPOINT_RATIO * train_length))
    longest = longer[-1] if longer else None
    sd_block, se_block = _block_spread(at_four)
    own, other = speed(scheme), speed(none) if none else None
    return Summary(
        scheme=scheme,
        outcomes=dict(Counter(run.outcome for run in scheme.runs)),
        curves=curves,
        nll=interval(base),
        nll_se_block=_block_spread(base)[1],
        bits_per_byte=_bits_per_byte(scheme, train_length),
        reach=_reach(scheme, longer, train_length) if base else None,
        reach_over="seeds" if len(base) >= 2 else "blocks",
        rise_sd_seed=_sd(at_four),
        rise_sd_block=sd_block,
        rise_se_block=se_block,
        slope=interval(per_seed(scheme, slope(lengths))) if len(lengths) >= 2 else None,
        unseen=interval(per_seed(scheme, unseen(longer))) if longer else None,
        gain=_negated(interval(per_seed(scheme, rise(PLAIN, longest)))) if longest else None,
        above_windowed=interval(per_seed(scheme, above_windowed(longest))) if longest else None,
        bimodal=statistics.two_groups([one.value for one in at_four.values()]),
        relative_speed=own / other if own and other else None,
    )


def _curve(scheme: Scheme, kind: str, lengths: list[int], train_length: int) -> Curve:
    points = []
    for length in lengths:
        levels = [run.levels[kind, length] for run in scheme.by_seed.values() if (kind, length) in run.levels]
        if not levels:
            continue
        bad = next((level.status for level in levels if level.status != "ok"), None)
        values = per_seed(scheme, nll(kind, length)) if bad is None else {}
        rises = per_seed(scheme, rise(kind, length)) if bad is None else {}
        points.append(
            Point(
                length=length,
                ratio=length / train_length,
                status=bad or "ok",
                nll=float(np.mean([one.value for one in values.values()])) if values else None,
                band=interval(values) if len(values) >= 2 else None,
                rise=interval(rises),
                levels={seed: one.value for seed, one in values.items()},
                rises={seed: one.value for seed, one in rises.items()},
            )
        )
    return Curve(kind, points)


def _reach(scheme: Scheme, longer: list[int], train_length: int) -> Reach:
    """From the seeds' one-sided bounds; with one seed, from those of the checkpoint's blocks."""
    uppers: dict[int, float | None] = {}
    for length in longer:
        values = list(per_seed(scheme, rise(PLAIN, length)).values())
        uppers[length] = None
        if len(values) < len(scheme.by_seed):
            continue  # undefined or failed in some seed: it does not hold there
        if len(values) >= 2:
            uppers[length] = statistics.t_upper([one.value for one in values])
        elif (blocks := values[0].blocks) is not None:
            uppers[length] = statistics.block_upper(blocks.sums, blocks.counts)
    return statistics.reach(uppers, train_length)


def speed(scheme: Scheme) -> float | None:
    """Median training speed over seeds, tokens per second of wall clock."""
    speeds = [run.tokens_per_second for run in scheme.by_seed.values() if run.tokens_per_second]
    return float(np.median(speeds)) if speeds else None


def _bits_per_byte(scheme: Scheme, train_length: int) -> float | None:
    levels = [run.levels.get((PLAIN, train_length)) for run in scheme.by_seed.values()]
    values = [level.row.bits_per_byte for level in levels if level is not None]
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known and len(known) == len(values) else None


def _block_spread(values: PerSeed) -> tuple[float | None, float | None]:
    """SD of one block and standard error over blocks, of one checkpoint: the root mean square over seeds."""
    blocks = [one.blocks for one in values.values() if one.blocks is not None]
    if not blocks:
        return None, None
    sd = math.sqrt(np.mean([statistics.block_sd(one.sums, one.counts) ** 2 for one in blocks]))
    return sd, sd / math.sqrt(len(blocks[0].sums))


def _sd(values: PerSeed) -> float | None:
    return float(np.std([one.value for one in values.values()], ddof=1)) if len(values) >= 2 else None


def _negated(one: Interval | None) -> Interval | None:
    return None if one is None else dataclasses.replace(one, mean=-one.mean, low=-one.high, high=-one.low)


def _rank(one: Summary) -> tuple[float, str]:
    rises = [point.rise.mean for point in one.plain.points if point.rise is not None and point.ratio > 1]
    undefined = any(point.status != "ok" for point in one.plain.points)
    return (math.inf if undefined or not rises else rises[-1], one.scheme.label)


# -- the two primary endpoints -----------------------------------------------------------------------------------------


def endpoints(group: Group) -> dict[str, Endpoints]:
    """Label -> the scheme against the reference; empty without one."""
    reference = group.reference
    if reference is None:
        return {}
    others = [scheme for scheme in group.schemes if scheme is not reference]
    length = group.train_length
    base = {one.label: paired(one, reference, nll(PLAIN, length)) for one in others}
    risen = {one.label: paired(one, reference, rise(PLAIN, ENDPOINT_RATIO * length)) for one in others}
    same = _adjusted(base, lambda values: statistics.equivalence_p(values, MARGIN))
    differs = _adjusted(risen, statistics.difference_p)
    return {
        scheme.label: _judged(scheme, base[scheme.label], risen[scheme.label], same, differs, length)
        for scheme in others
    }


def paired(scheme: Scheme, reference: Scheme, measure: Measure) -> PerSeed:
    """Scheme less reference in every seed that both have, where their target tokens are the same."""
    own, other = scheme.by_seed, reference.by_seed
    found = {seed: _paired(own[seed], other[seed], measure) for seed in own.keys() & other.keys()}
    return {seed: value for seed, value in sorted(found.items()) if value is not None}


def _paired(a: RunData, b: RunData, measure: Measure) -> Contrast | None:
    first, second = measure(a), measure(b)
    if first is None or second is None or _targets(a) != _targets(b):
        return None
    return first - second


def _targets(run: RunData) -> object:
    level = run.levels.get((PLAIN, run.config.training.train_length))
    return None if level is None else level.targets


def _adjusted(values: dict[str, PerSeed], test: Callable[[list[float]], float]) -> dict[str, float]:
    """Holm over the schemes that have two seeds or more."""
    testable = {label: [one.value for one in found.values()] for label, found in values.items() if len(found) >= 2}
    return dict(zip(testable, statistics.holm([test(found) for found in testable.values()]), strict=True))


def _judged(
    scheme: Scheme, base: PerSeed, risen: PerSeed, same: dict[str, float], differs: dict[str, float], length: int
) -> Endpoints:
    values = [one.value for one in base.values()]
    not_worse = statistics.t_upper(values) < NOT_WORSE if len(values) >= 2 else None
    made = Endpoints(
        nll=interval(base),
        rise=interval(risen),
        equivalence_p=same.get(scheme.label),
        rise_p=differs.get(scheme.label),
        not_worse=not_worse,
        verdict="",
    )
    return dataclasses.replace(made, verdict=_verdict(scheme, made, length))


def _verdict(scheme: Scheme, found: Endpoints, train_length: int) -> str:
    """In words, from the two endpoints; what the seeds do not settle is n.s."""
    if not scheme.by_seed:
        return "no run is done"
    levels = [run.levels.get((PLAIN, ENDPOINT_RATIO * train_length)) for run in scheme.by_seed.values()]
    if any(level is not None and level.status == "undefined" for level in levels):
        return f"undefined at {ENDPOINT_RATIO}x"
    if found.rise is None or found.nll is None:
        return "not paired with rope: no verdict"
    if found.rise.n < SEEDS_FOR_A_CLAIM or found.rise.over == "blocks":
        return "one checkpoint: no verdict" if found.rise.over == "blocks" else f"{found.rise.n} seeds: no verdict"
    if found.rise_p is None or found.rise_p >= ALPHA:
        beyond = "n.s. beyond"
    elif found.rise.mean > 0:
        beyond = "extrapolates worse"
    else:
        beyond = "extrapolates better" if found.not_worse else "rises less"
    return f"{beyond}; {_in_distribution(found)}"


def _in_distribution(found: Endpoints) -> str:
    assert found.nll is not None
    if found.equivalence_p is not None and found.equivalence_p < ALPHA:
        return "equal at 1x"
    if found.nll.excludes_zero:
        return "worse at 1x" if found.nll.mean > 0 else "better at 1x"
    return "n.s. at 1x"
