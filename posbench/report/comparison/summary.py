"""The summary of each scheme: every figure is a contrast of levels, paired by seed and by block of text.

An interval is over seeds and documents, of one checkpoint over documents alone. Words go by joint bounds (`claims`) of
the primary figures: nll at the training length and the rise of nll at 4x against the reference, and how far each scheme
holds. All else is exploratory.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from posbench.evaluation import intervals, levels
from posbench.evaluation.intervals import Documents, Interval
from posbench.evaluation.levels import REACH_LIMIT, Contrast, weighted
from posbench.evaluation.measure import Learned
from posbench.report.comparison import claims, load, looks, statistics
from posbench.report.comparison.claims import LEAST, MARGIN, AtOne, Beyond, Bounds, Reach
from posbench.report.comparison.load import Group, RunData, Scheme
from posbench.report.comparison.looks import Look
from posbench.report.comparison.statistics import SEEDS_FOR_A_CLAIM
from posbench.run_folder.rows import PLAIN, WINDOWED

ENDPOINT_RATIO = 4

BEYOND: dict[Beyond, str] = {
    "better": "extrapolates better",
    "less": "rises less",
    "worse": "extrapolates worse",
    "small": "differs by less than {least} at {ratio}",
    "open": "not resolved at {ratio}",
}
AT_ONE: dict[AtOne, str] = {
    "equivalent": "equivalent within {margin} at 1x",
    "better": "better at 1x",
    "worse": "worse at 1x",
    "small": "differs by less than {least} at 1x",
    "open": "not resolved at 1x",
}


PerSeed = dict[int, Contrast]
PerRun = Callable[[RunData], Contrast | None]


def per_seed(scheme: Scheme, measure: PerRun) -> PerSeed:
    """A measure of every run that ended well and has it."""
    found = {seed: measure(run) for seed, run in scheme.by_seed.items()}
    return {seed: value for seed, value in found.items() if value is not None}


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

    Where the documents of several seeds' blocks are not known, or not the same, over seeds on their very text.
    """
    return _shown(_interval(values))


def _interval(values: PerSeed) -> Interval | None:
    blocks = [one.blocks for one in values.values() if one.blocks is not None]
    if len(values) == 1:
        return intervals.over_text(blocks[0]) if blocks else None
    if len(blocks) == len(values) and all(one.documents is not None and one.same_text(blocks[0]) for one in blocks):
        found = intervals.over_seeds_and_text(blocks) if blocks else None
        if found:
            return found
    return seed_interval(values)


def seed_interval(values: PerSeed) -> Interval | None:
    """Over seeds, on this very text; None with one seed."""
    return _shown(intervals.over_seeds([one.value for one in values.values()])) if len(values) >= 2 else None


def text_interval(values: PerSeed) -> Interval | None:
    """Over documents, for these very checkpoints; None where the blocks of one are unknown or of another text."""
    blocks = weighted([(1 / len(values), one.blocks) for one in values.values()]) if values else None
    return None if blocks is None else intervals.over_text(blocks)


# -- measures ----------------------------------------------------------------------------------------------------------


def nll(kind: str, length: int) -> PerRun:
    return lambda run: run.levels.nll(kind, length)


def rise(kind: str, length: int) -> PerRun:
    """NLL(C) - NLL(L): what more context than in training costs; below 0 it helps."""
    return lambda run: run.levels.rise(kind, length)


def above_windowed(length: int) -> PerRun:
    """NLL(C) less that of the same model with attention narrowed to the training length."""
    return lambda run: run.levels.contrast((1, PLAIN, length), (-1, WINDOWED, length))


def against_plain(kind: str, length: int) -> PerRun:
    """The change by an extension at a length; below 0 it helps."""
    return lambda run: run.levels.contrast((1, kind, length), (-1, PLAIN, length))


def slope(lengths: Sequence[int]) -> PerRun:
    """Least-squares slope of nll per doubling of context, over these lengths."""
    x = np.log2(np.array(lengths, dtype=np.float64))
    weights = (x - x.mean()) / ((x - x.mean()) ** 2).sum()
    return lambda run: run.levels.contrast(*((w, PLAIN, c) for w, c in zip(weights, lengths, strict=True)))


def unseen(lengths: Sequence[int]) -> PerRun:
    """Mean nll over lengths beyond the training length only."""
    return lambda run: run.levels.contrast(*((1 / len(lengths), PLAIN, length) for length in lengths))


# -- summaries ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Point:
    """A scheme at one context length."""

    length: int
    ratio: float
    status: str  # ok, undefined, too_short, failed, or missing
    nll: float | None  # mean over seeds
    band: Interval | None  # of nll, over seeds on this text, which all schemes share; None for a single checkpoint
    rise: Interval | None  # over seeds and documents
    levels: dict[int, float]  # nll per seed
    rises: dict[int, float]  # per seed


@dataclasses.dataclass(frozen=True)
class Curve:
    kind: str  # plain, windowed, or an extension
    points: list[Point]

    @property
    def undefined_at(self) -> float | None:
        """The first multiple of the training length at which the scheme is undefined."""
        return next((point.ratio for point in self.points if point.status == "undefined"), None)


@dataclasses.dataclass(frozen=True)
class Endpoints:
    """A scheme against the reference, paired by seed and block. Words go by the joint bounds."""

    nll: Interval | None  # difference of nll at the training length
    rise: Interval | None  # difference of the rise at 4x
    rise_on_text: Interval | None  # the same over seeds only, on this very text
    rise_of_checkpoints: Interval | None  # the same over documents only, for these very checkpoints
    nll_bounds: Bounds | None  # None without a verdict
    rise_bounds: Bounds | None
    level: float | None  # of each of these bounds
    verdict: "Verdict"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The verdict of the endpoints, in words; `text` alone if nothing is resolved."""

    text: str
    beyond: Beyond | None = None  # of the rise at 4x
    at_one: AtOne | None = None  # of nll at 1x


@dataclasses.dataclass(frozen=True)
class Gate:
    """Whether a scheme has learned more than the best n-gram model of the same tokens; what has not is not ranked."""

    ceiling: float  # nll of that model on the same targets, nats per token
    learned: Learned


@dataclasses.dataclass(frozen=True)
class Summary:
    """Everything that the tables and pictures show of one scheme."""

    scheme: Scheme
    outcomes: dict[str, int]  # done, diverged, oom ... -> runs
    curves: list[Curve]  # the plain one first
    nll: Interval | None  # at the training length
    nll_on_text: Interval | None  # over seeds only
    nll_of_checkpoints: Interval | None  # over documents only
    gate: Gate | None  # None where no run knows it
    bits_per_byte: float | None
    slope: Interval | None
    unseen: Interval | None
    gain: Interval | None  # NLL(L) - NLL(longest)
    above_windowed: Interval | None  # at the longest
    bimodal: bool
    rise_on_text: Interval | None  # at 4x, over seeds only
    endpoints: Endpoints | None = None
    reach: Reach | None = None  # None where it has not learned
    uses: int | None = None  # tokens of the training length

    @property
    def plain(self) -> Curve:
        return self.curves[0]

    @property
    def learned(self) -> Learned | None:
        """None where no run knows it."""
        return self.gate.learned if self.gate else None

    @property
    def ranked(self) -> bool:
        """Whether it has learned, as far as is known."""
        return levels.may_claim(self.learned)

    @property
    def n_done(self) -> int:
        return self.outcomes.get("done", 0)

    @property
    def tokens_per_second(self) -> float | None:
        return speed(self.scheme)


def summarise(group: Group, least: float = LEAST, earlier: Sequence[Look] = ()) -> list[Summary]:
    """One summary per scheme: the one that rises least at the longest length first, then what has not learned.

    What has no run that is done comes last.

    Args:
        least: nats per token; a smaller difference is not called better or worse.
        earlier: looks at these schemes by earlier reports.
    """
    lengths = sorted({length for run in group.runs for kind, length in run.levels.at if kind == PLAIN})
    found = [_summary(scheme, lengths, group.train_length) for scheme in group.schemes]
    against, far = _judged(group, least, earlier)
    found = [
        dataclasses.replace(
            one,
            endpoints=against.get(one.scheme.label),
            reach=far.reach.get(one.scheme.label),
            uses=far.uses.get(one.scheme.label),
        )
        for one in found
    ]
    return sorted(found, key=_rank)


def _summary(scheme: Scheme, lengths: list[int], train_length: int) -> Summary:
    longer = [length for length in lengths if length > train_length]
    from_one_on = [length for length in lengths if length >= train_length]
    kinds = sorted({kind for run in scheme.by_seed.values() for kind, _ in run.levels.at} - {PLAIN})
    curves = [_curve(scheme, kind, lengths, train_length) for kind in (PLAIN, *kinds)]
    base = per_seed(scheme, nll(PLAIN, train_length))
    at_four = per_seed(scheme, rise(PLAIN, ENDPOINT_RATIO * train_length))
    longest = longer[-1] if longer else None
    return Summary(
        scheme=scheme,
        outcomes=dict(Counter(run.outcome for run in scheme.runs)),
        curves=curves,
        nll=interval(base),
        nll_on_text=seed_interval(base),
        nll_of_checkpoints=text_interval(base),
        gate=gate(scheme),
        bits_per_byte=_bits_per_byte(scheme),
        slope=interval(per_seed(scheme, slope(from_one_on))) if len(from_one_on) >= 2 else None,
        unseen=interval(per_seed(scheme, unseen(longer))) if longer else None,
        gain=_gain(scheme, longest),
        above_windowed=interval(per_seed(scheme, above_windowed(longest))) if longest else None,
        bimodal=_apart(at_four),
        rise_on_text=seed_interval(at_four),
    )


def _curve(scheme: Scheme, kind: str, lengths: list[int], train_length: int) -> Curve:
    points = []
    for length in lengths:
        found = [run.levels.at[kind, length] for run in scheme.by_seed.values() if (kind, length) in run.levels.at]
        if not found:
            continue
        bad = next((level.status for level in found if level.status != "ok"), None)
        values = per_seed(scheme, nll(kind, length)) if bad is None else {}
        rises = per_seed(scheme, rise(kind, length)) if bad is None else {}
        points.append(
            Point(
                length=length,
                ratio=length / train_length,
                status=bad or "ok",
                nll=float(np.mean([one.value for one in values.values()])) if values else None,
                band=seed_interval(values),
                rise=interval(rises),
                levels={seed: one.value for seed, one in values.items()},
                rises={seed: one.value for seed, one in rises.items()},
            )
        )
    return Curve(kind, points)


def gate(scheme: Scheme) -> Gate | None:
    """The gate over seeds and documents, by `levels.learned`; None where no run knows it."""
    known = [
        (level.nll, level.row.ngram_nll)
        for level in (run.levels.at_one for run in scheme.by_seed.values())
        if level is not None and level.nll is not None and level.row.ngram_nll is not None
    ]
    if not known:
        return None
    nll, ceiling = np.mean(known, axis=0)
    above = per_seed(scheme, lambda run: run.levels.above_ngram)
    paired_by_text = all(one.blocks is not None for one in above.values())
    return Gate(float(ceiling), levels.learned(float(nll - ceiling), interval(above) if paired_by_text else None))


def documents(group: Group) -> Documents | None:
    """The documents behind the figures of a set; where runs differ, the most uneven ones. None if no run knows them."""
    blocks = [level.blocks for run in group.runs if run.done and (level := run.levels.at_one)]
    found = [behind for one in blocks if one and (behind := intervals.documents_of(one))]
    return max(found, key=lambda behind: behind.largest, default=None)


def speed(scheme: Scheme) -> float | None:
    """Median training speed over seeds, tokens per second of wall clock."""
    speeds = [run.tokens_per_second for run in scheme.by_seed.values() if run.tokens_per_second]
    return float(np.median(speeds)) if speeds else None


def _bits_per_byte(scheme: Scheme) -> float | None:
    values = [run.levels.at_one.row.bits_per_byte for run in scheme.by_seed.values() if run.levels.at_one]
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known and len(known) == len(values) else None


def _gain(scheme: Scheme, longest: int | None) -> Interval | None:
    found = interval(per_seed(scheme, rise(PLAIN, longest))) if longest else None
    return found.negated() if found else None


def _rank(one: Summary) -> tuple[bool, bool, float, str]:
    """The order of schemes: those without a finished run last, after those that have not learned."""
    rises = [point.rise.mean for point in one.plain.points if point.rise is not None and point.ratio > 1]
    undefined = any(point.status != "ok" for point in one.plain.points)
    return (not one.n_done, not one.ranked, math.inf if undefined or not rises else rises[-1], one.scheme.label)


# -- words -------------------------------------------------------------------------------------------------------------

Pair = tuple[PerSeed, PerSeed]  # differences from the reference: of nll at the training length, of the rise at 4x


@dataclasses.dataclass(frozen=True)
class Judged:
    """What joint intervals say of the schemes of a set, by label."""

    at_one: dict[str, Bounds]
    beyond: dict[str, Bounds]
    words: dict[str, tuple[AtOne, Beyond]]
    reach: dict[str, Reach]
    uses: dict[str, int | None]
    levels: dict[str, float]  # of each interval

    def level_of(self, label: str) -> float | None:
        return self.levels.get(label) if label in self.words else None


def judge(
    pairs: Mapping[str, Pair],
    rises: Mapping[str, Mapping[int, PerSeed]],
    train_length: int,
    least: float = LEAST,
    schemes: int = 0,
    looks: Mapping[str, int] | None = None,
) -> Judged:
    """The words of a set of schemes.

    Args:
        pairs: by label, of the schemes that are compared with the reference and have `SEEDS_FOR_A_CLAIM` seeds.
        rises: by label and length but the training length, of every scheme; empty where the scheme is undefined.
        schemes: number that the sweep named, with the reference, if it is more than there are here.
        looks: by label, how often its seeds were looked at, this report included; 1 where nothing is said.
    """
    schemes = max(schemes, len(rises))
    lengths = sorted({length for each in rises.values() for length in each})
    # Two differences of each from the reference, and of each its rises at longer lengths and at shorter ones.
    intervals_of_all = 2 * (schemes - 1) + schemes * len({length > train_length for length in lengths})
    levels_of = {label: claims.level(intervals_of_all, (looks or {}).get(label, 1)) for label in rises}

    def joint(values: Mapping[str, PerSeed]) -> dict[str, Bounds]:
        found = {label: one for label, each in values.items() if (one := _of_claim(each)) is not None}
        apart = {label for label, each in values.items() if _apart(each)}
        alike = claims.moderated({label: one for label, one in found.items() if label not in apart})
        return {label: claims.bounds(alike.get(label, one), levels_of[label]) for label, one in found.items()}

    at_one = joint({label: pair[0] for label, pair in pairs.items()})
    beyond = joint({label: pair[1] for label, pair in pairs.items()})
    words = {
        label: (claims.at_one(at_one[label], least), claims.beyond(beyond[label], at_one[label], least))
        for label in pairs
        if label in at_one and label in beyond
    }
    by_length = {length: joint({label: each.get(length, {}) for label, each in rises.items()}) for length in lengths}
    unknown = Bounds(-math.inf, math.inf)  # there are values, but nothing to tell their error by
    rise_of = {
        label: {n: by_length[n].get(label, unknown) if values else None for n, values in each.items()}
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
    return Judged(at_one, beyond, words, reach, uses, levels_of)


def _of_claim(values: PerSeed) -> Interval | None:
    """Over seeds and documents; of fewer seeds than a claim takes over documents, for these very checkpoints."""
    return interval(values) if len(values) >= SEEDS_FOR_A_CLAIM else text_interval(values)


def _apart(values: PerSeed) -> bool:
    return statistics.two_groups([one.value for one in values.values()])


# -- the two primary endpoints -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Far:
    """How far schemes hold, and how much of the training length they use, by label."""

    reach: dict[str, Reach]
    uses: dict[str, int | None]


def _judged(group: Group, least: float, earlier: Sequence[Look]) -> tuple[dict[str, Endpoints], Far]:
    """Label -> the scheme against the reference, and how far it holds; each family of schemes on its own."""
    length, reference = group.train_length, group.reference
    base, risen = nll(PLAIN, length), rise(PLAIN, ENDPOINT_RATIO * length)
    others = [one for one in group.schemes if reference is not None and one is not reference]
    pairs = {one.label: (paired(one, reference, base), paired(one, reference, risen)) for one in others if reference}
    gates = {one.label: known.learned for one in group.schemes if (known := gate(one))}
    unlearned = {label: found for label, found in gates.items() if not levels.may_claim(found)}
    behind = documents(group)
    one_has_half = behind.no_verdict if behind else ""
    why = {
        one.label: _no_verdict(one, reference, unlearned, pairs[one.label], length) or one_has_half
        for one in others
        if reference
    }
    looks_of = {one.label: looks.number(looks.of(one, reference), earlier) for one in group.schemes}
    found: dict[str, Endpoints] = {}
    far = Far({}, {})
    for labels, number in load.families(group):
        schemes = [one for one in group.schemes if one.label in labels]
        ranked = [one for one in schemes if one.label not in unlearned and per_seed(one, base)]
        rises = {one.label: _rises(one, length) for one in ranked if not one_has_half}
        tested = {one.label: pairs[one.label] for one in schemes if one in others and not why[one.label]}
        judged = judge(tested, rises, length, least, number, looks_of)
        far.reach.update(judged.reach)
        far.uses.update(judged.uses)
        for one in (one for one in schemes if one in others):
            at_one, beyond = pairs[one.label]
            found[one.label] = Endpoints(
                interval(at_one), interval(beyond), seed_interval(beyond), text_interval(beyond),
                judged.at_one.get(one.label), judged.beyond.get(one.label), judged.level_of(one.label),
                _verdict(judged.words[one.label], least) if one.label in judged.words else Verdict(why[one.label]),
            )  # fmt: skip
    return found, far


def _rises(scheme: Scheme, train_length: int) -> dict[int, PerSeed]:
    """nll against the training length, by every other length; empty where undefined or failed in some seed."""
    measured = sorted({at for run in scheme.by_seed.values() for kind, at in run.levels.at if kind == PLAIN})
    found = {length: per_seed(scheme, rise(PLAIN, length)) for length in measured if length != train_length}
    return {length: each if len(each) == len(scheme.by_seed) else {} for length, each in found.items()}


def paired(scheme: Scheme, reference: Scheme, measure: PerRun) -> PerSeed:
    """Scheme less reference in every seed that both have, where their target tokens are the same."""
    own, other = scheme.by_seed, reference.by_seed
    found = {seed: _paired(own[seed], other[seed], measure) for seed in own.keys() & other.keys()}
    return {seed: value for seed, value in sorted(found.items()) if value is not None}


def _paired(a: RunData, b: RunData, measure: PerRun) -> Contrast | None:
    first, second = measure(a), measure(b)
    if first is None or second is None or _targets(a) != _targets(b):
        return None
    return first - second


def _targets(run: RunData) -> object:
    level = run.levels.at_one
    return None if level is None else (level.targets, level.row.dtype)


def _no_verdict(scheme: Scheme, reference: Scheme, unlearned: Mapping[str, str], pair: Pair, train_length: int) -> str:
    """Why a scheme has no verdict; empty if it has one."""
    if not scheme.by_seed:
        return "no run is done"
    if gate := unlearned.get(scheme.label):
        return "not learned: not ranked" if gate == "no" else "learned: not resolved, not ranked"
    if gate := unlearned.get(reference.label):
        label = reference.label
        return f"{label} has not learned" if gate == "no" else f"whether {label} has learned is not resolved"
    far = [run.levels.at.get((PLAIN, ENDPOINT_RATIO * train_length)) for run in scheme.by_seed.values()]
    if any(level is not None and level.status == "undefined" for level in far):
        return f"undefined at {ENDPOINT_RATIO}x"
    seeds = min(len(values) for values in pair)
    if not seeds or any(interval(values) is None for values in pair):
        return f"not paired with {reference.label}: no verdict"
    if seeds < SEEDS_FOR_A_CLAIM:
        return f"{'one checkpoint' if seeds == 1 else f'{seeds} seeds'}: no verdict"
    return ""


def _verdict(words: tuple[AtOne, Beyond], least: float) -> Verdict:
    at_one, beyond = words
    said = {"least": f"{least:g}", "margin": f"{MARGIN:g}", "ratio": f"{ENDPOINT_RATIO}x"}
    return Verdict("; ".join([BEYOND[beyond].format(**said), AT_ONE[at_one].format(**said)]), beyond, at_one)
