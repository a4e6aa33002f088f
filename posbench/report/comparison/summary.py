"""The summary of each scheme: every figure is a contrast of levels, paired by seed and by block of text.

With two seeds or more an interval is over seeds and documents; with one it is over documents and speaks for that
checkpoint only. Two endpoints per scheme against `rope` are primary: nll at the training length and the rise of nll at
4x. The p-values that verdicts rest on (difference at 1x, equivalence at 1x, difference of the rise) are adjusted all
together (Holm), over schemes and endpoints. So the chance is at most one in twenty that a table calls any scheme
different from `rope`, or equivalent, that is not. Two words rest on more than an adjusted p-value, and are wrong more
often where the truth is near their limit: "differs by less than ..." also on a mean, "extrapolates better" also on an
unadjusted bound of nll at 1x.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from posbench.evaluation import intervals, levels
from posbench.evaluation.intervals import Interval
from posbench.evaluation.levels import Contrast, Reach, weighted
from posbench.evaluation.measure import Learned
from posbench.report.comparison import statistics
from posbench.report.comparison.load import Group, RunData, Scheme
from posbench.report.comparison.statistics import SEEDS_FOR_A_CLAIM
from posbench.run_folder.rows import PLAIN, WINDOWED

MARGIN = 0.03  # nats per token: nll at 1x within it is called equivalent
NOT_WORSE = 0.05  # a scheme whose nll at 1x may be worse by more than this does not count as extrapolating
ENDPOINT_RATIO = 4
LEAST = 0.02  # nats per token: less is not called better or worse, and planning figures are for it
ALPHA = 0.05

Beyond = Literal["better", "less", "worse", "small", "open"]
BEYOND: dict[Beyond, str] = {
    "better": "extrapolates better",
    "less": "rises less",
    "worse": "extrapolates worse",
    "small": "differs by less than {least} at {ratio}",
    "open": "not resolved at {ratio}",
}
AtOne = Literal["equivalent", "better", "worse", "small", "open"]
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


def interval(values: PerSeed) -> Interval | None:
    """The figures of a scheme, over seeds and documents; of one checkpoint, over documents.

    Where the documents of several seeds' blocks are not known, or not the same, over seeds on their very text.
    """
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
    return intervals.over_seeds([one.value for one in values.values()]) if len(values) >= 2 else None


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
    """A scheme against the reference, paired by seed and block. p-values are adjusted, all of a group together."""

    nll: Interval | None  # difference of nll at the training length
    rise: Interval | None  # difference of the rise at 4x
    rise_on_text: Interval | None  # the same over seeds only, on this very text
    rise_of_checkpoints: Interval | None  # the same over documents only, for these very checkpoints
    nll_p: float | None  # "no difference at 1x"
    equivalence_p: float | None  # "a difference of MARGIN or more at 1x"
    rise_p: float | None  # "no difference of the rise"
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
    reach: Reach | None
    uses: int | None  # tokens of the training length
    slope: Interval | None
    unseen: Interval | None
    gain: Interval | None  # NLL(L) - NLL(longest)
    above_windowed: Interval | None  # at the longest
    bimodal: bool
    endpoints: Endpoints | None = None

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


def summarise(group: Group, least: float = LEAST) -> list[Summary]:
    """One summary per scheme: the one that rises least at the longest length first, then what has not learned.

    What has no run that is done comes last.

    Args:
        least: nats per token; a smaller difference is not called better or worse.
    """
    lengths = sorted({length for run in group.runs for kind, length in run.levels.at if kind == PLAIN})
    found = [_summary(scheme, lengths, group.train_length) for scheme in group.schemes]
    verdicts = endpoints(group, least)
    return [dataclasses.replace(one, endpoints=verdicts.get(one.scheme.label)) for one in sorted(found, key=_rank)]


def _summary(scheme: Scheme, lengths: list[int], train_length: int) -> Summary:
    longer = [length for length in lengths if length > train_length]
    shorter = [length for length in lengths if length < train_length]
    from_one_on = [length for length in lengths if length >= train_length]
    kinds = sorted({kind for run in scheme.by_seed.values() for kind, _ in run.levels.at} - {PLAIN})
    curves = [_curve(scheme, kind, lengths, train_length) for kind in (PLAIN, *kinds)]
    base = per_seed(scheme, nll(PLAIN, train_length))
    at_four = per_seed(scheme, rise(PLAIN, ENDPOINT_RATIO * train_length))
    longest = longer[-1] if longer else None
    known = gate(scheme)
    may_claim = levels.may_claim(known.learned if known else None)
    return Summary(
        scheme=scheme,
        outcomes=dict(Counter(run.outcome for run in scheme.runs)),
        curves=curves,
        nll=interval(base),
        nll_on_text=seed_interval(base),
        nll_of_checkpoints=text_interval(base),
        gate=known,
        bits_per_byte=_bits_per_byte(scheme),
        reach=levels.reach(_uppers(scheme, longer), train_length) if base and may_claim else None,
        uses=levels.uses(_uppers(scheme, shorter), train_length) if base and may_claim else None,
        slope=interval(per_seed(scheme, slope(from_one_on))) if len(from_one_on) >= 2 else None,
        unseen=interval(per_seed(scheme, unseen(longer))) if longer else None,
        gain=_gain(scheme, longest),
        above_windowed=interval(per_seed(scheme, above_windowed(longest))) if longest else None,
        bimodal=statistics.two_groups([one.value for one in at_four.values()]),
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


def _uppers(scheme: Scheme, lengths: list[int]) -> dict[int, float | None]:
    """One-sided upper bounds of nll above that at the training length."""
    uppers: dict[int, float | None] = {}
    for length in lengths:
        values = per_seed(scheme, rise(PLAIN, length))
        found = interval(values)
        # Undefined or failed in some seed: it does not hold there.
        uppers[length] = found.upper if found and len(values) == len(scheme.by_seed) else None
    return uppers


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


# -- the two primary endpoints -----------------------------------------------------------------------------------------


def endpoints(group: Group, least: float = LEAST) -> dict[str, Endpoints]:
    """Label -> the scheme against the reference; empty without one."""
    reference = group.reference
    if reference is None:
        return {}
    length = group.train_length
    base, risen = nll(PLAIN, length), rise(PLAIN, ENDPOINT_RATIO * length)
    pairs = {
        one.label: (paired(one, reference, base), paired(one, reference, risen))
        for one in group.schemes
        if one is not reference
    }
    gates = {one.label: known.learned for one in group.schemes if (known := gate(one))}
    unlearned = {label: found for label, found in gates.items() if not levels.may_claim(found)}
    tested = {} if reference.label in unlearned else {k: pair for k, pair in pairs.items() if k not in unlearned}
    raw = {(label, name): p for label, pair in tested.items() for name, p in _tests(*pair).items()}
    adjusted = dict(zip(raw, statistics.holm(list(raw.values())), strict=True))
    found = {}
    for scheme in (one for one in group.schemes if one is not reference):
        at_one, beyond = pairs[scheme.label]
        p_values = {name: adjusted.get((scheme.label, name)) for name in ("nll_p", "equivalence_p", "rise_p")}
        made = Endpoints(
            interval(at_one), interval(beyond), seed_interval(beyond), text_interval(beyond), **p_values,
            verdict=Verdict(""),
        )  # fmt: skip
        verdict = _verdict(scheme, reference, unlearned, made, length, least)
        found[scheme.label] = dataclasses.replace(made, verdict=verdict)
    return found


def _tests(at_one: PerSeed, beyond: PerSeed) -> dict[str, float]:
    """The tests that a verdict rests on, of what two seeds or more have; not adjusted."""
    found = {}
    if len(at_one) >= 2 and (one := interval(at_one)):
        found = {"nll_p": one.difference_p, "equivalence_p": one.equivalence_p(MARGIN)}
    if len(beyond) >= 2 and (one := interval(beyond)):
        found["rise_p"] = one.difference_p
    return found


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


def _verdict(
    scheme: Scheme, reference: Scheme, unlearned: Mapping[str, str], found: Endpoints, train_length: int, least: float
) -> Verdict:
    """From the two endpoints; what seeds and documents do not settle is said to be open."""
    if not scheme.by_seed:
        return Verdict("no run is done")
    if gate := unlearned.get(scheme.label):
        return Verdict("not learned: not ranked" if gate == "no" else "learned: not resolved, not ranked")
    if gate := unlearned.get(reference.label):
        label = reference.label
        return Verdict(f"{label} has not learned" if gate == "no" else f"whether {label} has learned is not resolved")
    far = [run.levels.at.get((PLAIN, ENDPOINT_RATIO * train_length)) for run in scheme.by_seed.values()]
    if any(level is not None and level.status == "undefined" for level in far):
        return Verdict(f"undefined at {ENDPOINT_RATIO}x")
    if found.rise is None or found.nll is None:
        return Verdict(f"not paired with {reference.label}: no verdict")
    if found.rise.seeds < SEEDS_FOR_A_CLAIM:
        said = "one checkpoint" if found.rise.seeds == 1 else f"{found.rise.seeds} seeds"
        return Verdict(f"{said}: no verdict")
    beyond, at_one = _beyond(found.rise, found, least), _at_one(found.nll, found, least)
    words = {"least": f"{least:g}", "margin": f"{MARGIN:g}", "ratio": f"{ENDPOINT_RATIO}x"}
    return Verdict("; ".join([BEYOND[beyond].format(**words), AT_ONE[at_one].format(**words)]), beyond, at_one)


def _beyond(rise: Interval, found: Endpoints, least: float) -> Beyond:
    if found.rise_p is None or found.rise_p >= ALPHA:
        return "open"
    if abs(rise.mean) < least:
        return "small"
    if rise.mean > 0:
        return "worse"
    return "better" if found.nll and found.nll.upper < NOT_WORSE else "less"


def _at_one(nll: Interval, found: Endpoints, least: float) -> AtOne:
    if found.equivalence_p is not None and found.equivalence_p < ALPHA:
        return "equivalent"
    if found.nll_p is None or found.nll_p >= ALPHA:
        return "open"
    if abs(nll.mean) < least:
        return "small"
    return "worse" if nll.mean > 0 else "better"
