"""The summary of each scheme: every figure is a contrast of levels, paired by seed and by block of text.

Words go by joint bounds (`judgement`) of the primary figures: nll at the training length and the rise of nll at 4x
against the reference, and how far each scheme holds. All else is exploratory.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np

from posbench.evaluation import intervals, levels
from posbench.evaluation.intervals import Documents, Interval
from posbench.evaluation.levels import Contrast
from posbench.evaluation.measure import Learned
from posbench.report.comparison import load, statistics
from posbench.report.comparison.claims import LEAST, AtOne, Beyond, Bounds, Reach
from posbench.report.comparison.judgement import (
    Judged,
    Pair,
    PerSeed,
    in_two_groups,
    interval,
    judge,
    of_claim,
    seed_interval,
    text_interval,
)
from posbench.report.comparison.load import Group, RunData, Scheme
from posbench.report.comparison.statistics import SEEDS_FOR_A_CLAIM
from posbench.run_folder.rows import PLAIN, WINDOWED

ENDPOINT_RATIO = 4

BEYOND: dict[Beyond, str] = {
    "less": "rises less",
    "worse": "extrapolates worse",
    "open": f"not resolved at {ENDPOINT_RATIO}x",
}
AT_ONE: dict[AtOne, str] = {"better": "better at 1x", "worse": "worse at 1x", "open": "not resolved at 1x"}


PerRun = Callable[[RunData], Contrast | None]


def per_seed(scheme: Scheme, measure: PerRun) -> PerSeed:
    """A measure of every run that ended well and has it."""
    found = {seed: measure(run) for seed, run in scheme.by_seed.items()}
    return {seed: value for seed, value in found.items() if value is not None}


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
    nll_bounds: Bounds | None  # None without a verdict
    rise_bounds: Bounds | None
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
    above_windowed: Interval | None  # at the longest
    bimodal: bool
    rise_on_text: Interval | None  # at 4x, over seeds only
    endpoints: Endpoints | None = None
    reach: Reach | None = None  # None where it has not learned
    uses: int | None = None  # tokens of the training length

    @property
    def plain(self) -> Curve:
        return self.curves[0]

    def with_start(self, curve: Curve) -> list[Point]:
        """The points of a curve; if it was not measured at the training length, it starts as the plain one does."""
        if any(point.ratio == 1 for point in curve.points):
            return curve.points
        return [*(point for point in self.plain.points if point.ratio == 1), *curve.points]

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
        """Median training speed over seeds, by wall clock."""
        speeds = [run.tokens_per_second for run in self.scheme.by_seed.values() if run.tokens_per_second]
        return float(np.median(speeds)) if speeds else None


def summarise(group: Group, least: float = LEAST) -> list[Summary]:
    """One summary per scheme: the one that rises least at the longest length first, then what has not learned.

    The longest length is one at which all were measured. What has no run that is done comes last.

    Args:
        least: nats per token; a smaller difference is not called better or worse.
    """
    of_text = (item for run in group.runs for item in run.levels.at.items())
    lengths = sorted({at for (kind, at), one in of_text if kind == PLAIN and one.status != "too_short"})
    found = [_summary(scheme, lengths, group.train_length) for scheme in group.schemes]
    against, judged = _judged(group, least)
    found = [
        dataclasses.replace(
            one,
            endpoints=against.get(one.scheme.label),
            reach=judged[one.scheme.label].reach.get(one.scheme.label),
            uses=judged[one.scheme.label].uses.get(one.scheme.label),
        )
        for one in found
    ]
    shared = statistics.in_all({point.length for point in one.plain.points} for one in found if one.plain.points)
    longest = max((length for length in shared if length > group.train_length), default=None)
    return sorted(found, key=lambda one: _rank(one, longest))


def _summary(scheme: Scheme, lengths: list[int], train_length: int) -> Summary:
    kinds = sorted({kind for run in scheme.by_seed.values() for kind, _ in run.levels.at} - {PLAIN})
    curves = [_curve(scheme, kind, lengths, train_length) for kind in (PLAIN, *kinds)]
    base = per_seed(scheme, nll(PLAIN, train_length))
    at_four = per_seed(scheme, rise(PLAIN, ENDPOINT_RATIO * train_length))
    longest = max((length for length in lengths if length > train_length), default=None)
    return Summary(
        scheme=scheme,
        outcomes=dict(Counter(run.outcome for run in scheme.runs)),
        curves=curves,
        nll=interval(base),
        nll_on_text=seed_interval(base),
        nll_of_checkpoints=text_interval(base),
        gate=gate(scheme),
        bits_per_byte=_bits_per_byte(scheme),
        above_windowed=interval(per_seed(scheme, above_windowed(longest))) if longest else None,
        bimodal=in_two_groups(at_four),
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
    """The gate over seeds and documents, by `levels.learned`; None where no run knows it.

    Of fewer seeds than `SEEDS_FOR_A_CLAIM` it is over documents, for these very checkpoints.
    """
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
    found = of_claim(above) if paired_by_text else None
    return Gate(float(ceiling), levels.learned(float(nll - ceiling), found))


def documents(group: Group) -> Documents | None:
    """The documents behind the figures of a set; where runs differ, the most uneven ones. None if no run knows them."""
    blocks = [level.blocks for run in group.runs if run.done and (level := run.levels.at_one)]
    found = [intervals.documents_of(one) for one in blocks if one]
    return max(found, key=lambda behind: behind.largest, default=None)


def _bits_per_byte(scheme: Scheme) -> float | None:
    values = [run.levels.at_one.row.bits_per_byte for run in scheme.by_seed.values() if run.levels.at_one]
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known and len(known) == len(values) else None


def _rank(one: Summary, longest: int | None) -> tuple[bool, bool, float, str]:
    """The order of schemes: those without a finished run last, after those that have not learned."""
    rises = [point.rise.mean for point in one.plain.points if point.rise is not None and point.length == longest]
    unknown = any(point.status in ("undefined", "failed") for point in one.plain.points)
    return (not one.n_done, not one.ranked, math.inf if unknown or not rises else rises[0], one.scheme.label)


# -- the two primary endpoints -----------------------------------------------------------------------------------------


def _judged(group: Group, least: float) -> tuple[dict[str, Endpoints], dict[str, Judged]]:
    """Label -> the scheme against the reference, and what was judged of it; each family of schemes on its own."""
    against: dict[str, Endpoints] = {}
    judged: dict[str, Judged] = {}
    for labels, number in load.families(group):
        family = _family(group, labels, number)
        judged |= dict.fromkeys(labels, family.judged(least))
        against |= {label: family.endpoints(judged[label], label) for label in family.pairs}
    return against, judged


@dataclasses.dataclass(frozen=True)
class _Family:
    """Schemes whose words hold jointly."""

    train_length: int
    number: int  # of schemes that the sweep named, with the reference
    pairs: dict[str, Pair]  # by label, of those beside the reference
    why: dict[str, str]  # by label, why it has no verdict; empty if it has one
    rises: dict[str, dict[int, PerSeed | None]]

    def judged(self, least: float) -> Judged:
        tested = {label: pair for label, pair in self.pairs.items() if not self.why[label]}
        return judge(tested, self.rises, self.train_length, least, self.number)

    def endpoints(self, judged: Judged, label: str) -> Endpoints:
        """Those of a scheme, by what was judged of it."""
        (at_one, beyond), why, words = self.pairs[label], self.why[label], judged.words.get(label)
        verdict = _verdict(words) if words else Verdict(why or "not enough seeds: no verdict")
        bounds = judged.at_one.get(label), judged.beyond.get(label)
        return Endpoints(interval(at_one), interval(beyond), *bounds, verdict)


def _family(group: Group, labels: set[str], number: int) -> _Family:
    length, reference = group.train_length, group.reference
    base, risen = nll(PLAIN, length), rise(PLAIN, ENDPOINT_RATIO * length)
    schemes = [one for one in group.schemes if one.label in labels]
    gates = {one.label: known.learned for one in group.schemes if (known := gate(one))}
    unlearned = {label: found for label, found in gates.items() if not levels.may_claim(found)}
    behind = documents(group)
    one_has_half = behind.no_verdict if behind else ""
    ranked = [one for one in schemes if one.label not in unlearned and per_seed(one, base)]
    rises = {one.label: _rises(one, length) for one in ranked if not one_has_half}
    pairs, why = {}, {}
    for one in (one for one in schemes if reference is not None and one is not reference):
        assert reference
        pair = pairs[one.label] = paired(one, reference, base), paired(one, reference, risen)
        why[one.label] = _no_verdict(one, reference, unlearned, pair, length) or one_has_half
    return _Family(length, number, pairs, why, rises)


def _rises(scheme: Scheme, train_length: int) -> dict[int, PerSeed | None]:
    """nll against the training length, by every other length that all seeds have; empty where a seed is undefined.

    None where a seed has no finite loss. A length that the text is too short for is none.
    """
    levels_of = [run.levels.at for run in scheme.by_seed.values()]
    shared = statistics.in_all({at for kind, at in each if kind == PLAIN} for each in levels_of)
    found: dict[int, PerSeed | None] = {}
    for length in sorted(shared - {train_length}):
        statuses = {each[PLAIN, length].status for each in levels_of}
        values = per_seed(scheme, rise(PLAIN, length))
        if "undefined" in statuses:
            found[length] = {}
        elif "too_short" not in statuses:
            found[length] = values if len(values) == len(levels_of) else None
    return found


def paired(scheme: Scheme, reference: Scheme, measure: PerRun) -> PerSeed:
    """Scheme less reference in every seed that both have, where their target tokens are the same."""
    own, other = scheme.by_seed, reference.by_seed
    found = {seed: _paired(own[seed], other[seed], measure) for seed in own.keys() & other.keys()}
    return {seed: value for seed, value in sorted(found.items()) if value is not None}


def _paired(a: RunData, b: RunData, measure: PerRun) -> Contrast | None:
    first, second = measure(a), measure(b)
    if first is None or second is None or targets(a) != targets(b):
        return None
    return first - second


def targets(run: RunData) -> object:
    """Identity of the target tokens at the training length, and the precision they were scored in."""
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
    if pair[0] and not pair[1]:
        bad = next((level.status for level in far if level is not None and level.status != "ok"), "not paired")
        with_it = f" with {reference.label}" if bad == "not paired" else ""
        return f"{bad.replace('_', ' ')} at {ENDPOINT_RATIO}x{with_it}: no verdict"
    seeds = min(len(values) for values in pair)
    if not seeds or any(interval(values) is None for values in pair):
        return f"not paired with {reference.label}: no verdict"
    if seeds < SEEDS_FOR_A_CLAIM:
        return f"{'one checkpoint' if seeds == 1 else f'{seeds} seeds'}: no verdict"
    return ""


def _verdict(words: tuple[AtOne, Beyond]) -> Verdict:
    at_one, beyond = words
    return Verdict(f"{BEYOND[beyond]}; {AT_ONE[at_one]}", beyond, at_one)
