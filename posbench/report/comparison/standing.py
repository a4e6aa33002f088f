"""Statistics of each scheme on a task: the seeds that learned it, and accuracy beyond trained lengths.

A run has learned if it reaches the gate at every trained length. Medians, ranges and tests are over all seeds, learned
or not: to keep only those that learned would select by the outcome. A seed that diverged has no answer right. Medians
over the learned seeds alone are a second number (`of_learned`). A scheme of which fewer than half of the seeds learned
is not ranked. Against the reference there is a test of how many seeds learned, and one of accuracy at each of two
lengths. Their p-values are adjusted together (Holm), over schemes and tests. A table says if the seeds are too few for
any outcome to be significant.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from posbench.evaluation.answers import TRAINED, Answer, Place
from posbench.evaluation.intervals import clopper_pearson
from posbench.report.comparison import statistics
from posbench.report.comparison.load import Group, RunData, Scheme
from posbench.report.comparison.statistics import SEEDS_FOR_A_CLAIM, Exact
from posbench.run_folder.rows import PLAIN

ENDPOINTS = (2.0, 4.0)  # times those
LEAST = 0.01  # of accuracy: less is not called better or worse
ALPHA = 0.05


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median and range over seeds, each a share from 0 to 1."""

    median: float
    low: float
    high: float
    seeds: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Spread | None":
        known = [value for value in values if value is not None]
        return cls(float(np.median(known)), min(known), max(known), len(known)) if known else None


@dataclasses.dataclass(frozen=True)
class At:
    """A scheme at one place."""

    status: str  # ok, undefined, too_short, failed
    problem_length: int | None
    accuracy: Spread | None  # over all seeds
    exact_match: Spread | None  # the same
    of_learned: Spread | None  # accuracy over the learned seeds alone
    chance: float | None  # accuracy of guessing
    trivial: float | None  # accuracy of the task's trivial reader


@dataclasses.dataclass(frozen=True)
class Tested:
    """One test against the reference."""

    difference: float  # scheme less reference: of the share of seeds that learned, or of mean accuracy
    p: float  # adjusted
    least: float  # the smallest that so many seeds could have given, adjusted alike

    @property
    def too_small(self) -> bool:
        return self.least >= ALPHA


@dataclasses.dataclass(frozen=True)
class Against:
    """A scheme against the reference. A test is None where there is nothing to test."""

    learned: Tested | None
    accuracy: dict[float, Tested]  # by multiple of the longest trained length
    verdict: str


@dataclasses.dataclass(frozen=True)
class Standing:
    """Everything that tables and pictures show of one scheme on a task."""

    scheme: Scheme
    outcomes: dict[str, int]  # done, diverged ... -> runs
    learned: int  # seeds
    seeds: int  # whose outcome is known
    steps: float | None  # median over seeds to the gate; inf where most never got there
    at: dict[Place, At]
    against: Against | None = None

    @property
    def ranked(self) -> bool:
        """Whether half of the seeds or more learned."""
        return self.seeds > 0 and 2 * self.learned >= self.seeds

    @property
    def at_longest(self) -> float | None:
        """The median accuracy at the longest trained length."""
        found = self.at.get(TRAINED)
        return found.accuracy.median if found and found.accuracy else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the share of seeds that learn."""
        return clopper_pearson(self.learned, self.seeds) if self.seeds else None

    @property
    def undefined_at(self) -> float | None:
        """The first multiple of the longest trained length at which the scheme is undefined."""
        plain = [place for place, one in self.at.items() if place.as_trained and one.status == "undefined"]
        return min((place.ratio for place in plain), default=None)


def standings(group: Group) -> list[Standing]:
    """One per scheme: the most accurate beyond trained lengths first, what has not learned last.

    Beyond: by the mean of the medians over the lengths at which all were tested; what is undefined counts as 0.
    """
    found = [_standing(scheme) for scheme in group.schemes]
    against = _against(found, reference(group)) if len(found) > 1 else {}
    found = [dataclasses.replace(one, against=against.get(one.scheme.label)) for one in found]
    tested = ({place for place in one.at if place.as_trained and place.ratio > 1} for one in found if one.at)
    beyond = statistics.in_all(tested)
    return sorted(found, key=lambda one: _rank(one, beyond))


def reference(group: Group) -> Scheme:
    """The reference that others are tested against: as for text, else `none`, else the first."""
    none = next((scheme for scheme in group.schemes if scheme.name == "none"), None)
    return group.reference or none or group.schemes[0]


def learned(run: RunData) -> bool | None:
    """Whether a run learned; None where that is not known. One that diverged did not."""
    if run.outcome == "diverged":
        return False
    known = run.answers.learned if run.done else None
    return None if known is None else known == "yes"


def known_runs(scheme: Scheme) -> list[RunData]:
    """The runs of which it is known whether they learned."""
    return [run for run in scheme.runs if learned(run) is not None]


def places(standings: Sequence[Standing]) -> list[Place]:
    """Everywhere that any scheme was tested as it was trained: the task before its variants, by shift, by length."""
    own = {place for one in standings for place in one.at if place.kind == PLAIN}
    return sorted(own, key=lambda place: (place.variant, place.offset, place.ratio))


def known_at(standings: Sequence[Standing], column: str) -> dict[Place, float]:
    """`chance` or `trivial` by place, the same for every scheme. Rows of earlier versions lack them."""
    found = [(place, getattr(at, column)) for one in standings for place, at in one.at.items()]
    return {place: share for place, share in found if share is not None}


def _standing(scheme: Scheme) -> Standing:
    known = known_runs(scheme)
    steps = [run.answers.steps_to_gate for run in known]
    all_places = sorted({place for run in known for place in run.answers.at})
    return Standing(
        scheme=scheme,
        outcomes=dict(Counter(run.outcome for run in scheme.runs)),
        learned=sum(bool(learned(run)) for run in known),
        seeds=len(known),
        steps=float(np.median([math.inf if step is None else step for step in steps])) if steps else None,
        at={place: _at(place, known) for place in all_places},
    )


def _at(place: Place, known: list[RunData]) -> At:
    answers = answers_at(known, place)
    bad = next((answer.status for answer in answers if answer.status != "ok"), None)
    own = known if bad is None else []
    return At(
        bad or "ok",
        next((answer.row.problem_length for answer in answers), None),
        Spread.of(_share(run, place) for run in own),
        Spread.of(_share(run, place, "exact_match") for run in own),
        Spread.of(_share(run, place) for run in own if learned(run)),
        next((answer.chance for answer in answers if answer.chance is not None), None),
        next((answer.trivial for answer in answers if answer.trivial is not None), None),
    )


def answers_at(runs: list[RunData], place: Place) -> list[Answer]:
    return [run.answers.at[place] for run in runs if place in run.answers.at]


def _share(run: RunData, place: Place, column: str = "accuracy") -> float | None:
    """A run's share at a place: 0 if the run diverged, None if it has none there."""
    if run.outcome == "diverged":
        return 0.0
    return getattr(run.answers.at[place], column) if place in run.answers.at else None


def _rank(one: Standing, beyond: Collection[Place]) -> tuple[bool, float, float, str]:
    """Of equals beyond trained lengths, and of what has not learned, the more accurate first at the trained ones."""
    medians = [at.accuracy.median if (at := one.at.get(place)) and at.accuracy else 0.0 for place in beyond]
    mean = float(np.mean(medians)) if medians and one.ranked else 0.0
    return not one.ranked, -mean, -(one.at_longest or 0.0), one.scheme.label


# -- against the reference ---------------------------------------------------------------------------------------------

Key = tuple[str, float | None]  # label; multiple of the longest trained length, None: how many seeds learned


def _against(found: list[Standing], other: Scheme) -> dict[str, Against]:
    """Label -> a scheme against the reference."""
    base = next(one for one in found if one.scheme is other)
    own = [one for one in found if one is not base]
    raw: dict[Key, tuple[float, Exact]] = {}
    why: dict[Key, str] = {}  # there is no test of accuracy
    for one in own:
        if one.seeds and base.seeds:
            share = one.learned / one.seeds - base.learned / base.seeds
            test = statistics.fisher((one.learned, one.seeds), (base.learned, base.seeds))
            raw[one.scheme.label, None] = (share, test)
        for ratio in ENDPOINTS if one.ranked and base.ranked else ():
            tested = _accuracy_test(one, base, Place("", ratio, 0))
            if isinstance(tested, str):
                why[one.scheme.label, ratio] = tested
            else:
                raw[one.scheme.label, ratio] = tested
    p = statistics.holm([test.p for _, test in raw.values()])
    least = statistics.holm([test.least for _, test in raw.values()])
    tests = {
        key: Tested(difference, *adjusted)
        for (key, (difference, _)), adjusted in zip(raw.items(), zip(p, least, strict=True), strict=True)
    }
    return {one.scheme.label: _of_scheme(one, base, tests, why) for one in own}


def _accuracy_test(one: Standing, base: Standing, place: Place) -> tuple[float, Exact] | str:
    """Over all seeds; or why there is no test: a seed lacks the number, or the problems or the precision differ."""
    pair = [known_runs(standing.scheme) for standing in (one, base)]
    answers = [answer for runs in pair for answer in answers_at(runs, place)]
    if bad := next((answer.status for answer in answers if answer.status != "ok"), None):
        return bad.replace("_", " ")
    own, other = ([_share(run, place) for run in runs] for runs in pair)
    first, second = ([share for share in shares if share is not None] for shares in (own, other))
    if (len(first), len(second)) != (len(own), len(other)):
        return "not tested in all seeds" if first and second else "not tested"
    for column, word in (("targets_sha256", "problems"), ("dtype", "precision")):
        if len({getattr(answer.row, column) for answer in answers}) > 1:
            return f"other {word}"
    return float(np.mean(first) - np.mean(second)), statistics.permutation(first, second)


def _of_scheme(one: Standing, base: Standing, tests: dict[Key, Tested], why: dict[Key, str]) -> Against:
    label = one.scheme.label
    learned = tests.get((label, None))
    accuracy = {ratio: tests[label, ratio] for ratio in ENDPOINTS if (label, ratio) in tests}
    untested = {ratio: why[label, ratio] for ratio in ENDPOINTS if (label, ratio) in why}
    return Against(learned, accuracy, _verdict(one, base, learned, accuracy, untested))


def _verdict(
    one: Standing, base: Standing, learned: Tested | None, accuracy: dict[float, Tested], untested: dict[float, str]
) -> str:
    """In words; what seeds do not settle is said to be open, and too few of them to be too few."""
    if not one.seeds:
        return "no run is done"
    seeds = min(one.seeds, base.seeds)
    if seeds < SEEDS_FOR_A_CLAIM:
        said = [f"{'one seed' if seeds == 1 else f'{seeds} seeds'}: no verdict"]
        return "; ".join(["not learned: not ranked", *said] if not one.ranked else said)
    words = []
    if learned and learned.p < ALPHA:
        words.append(f"learned by {'more' if learned.difference > 0 else 'fewer'} seeds")
    if not one.ranked:
        return "; ".join(["not learned: not ranked", *words])
    if not base.ranked:
        return "; ".join([*words, f"{base.scheme.label} has not learned"])
    if accuracy and not words and all(test.too_small for test in accuracy.values()):
        return "n too small"
    settled = (
        _settled(one, ratio, accuracy[ratio]) if ratio in accuracy else f"{untested[ratio]} at {ratio:g}x"
        for ratio in ENDPOINTS
    )
    return "; ".join([*words, *settled])


def _settled(one: Standing, ratio: float, test: Tested) -> str:
    where = f"at {ratio:g}x"
    if test.too_small:
        return f"n too small {where}"
    if test.p >= ALPHA:
        return f"not resolved {where}"
    if abs(test.difference) < LEAST:
        return f"differs by less than {LEAST:.0%} {where}"
    at = one.at[Place("", ratio, 0)]
    if test.difference > 0 and at.accuracy and at.trivial is not None and at.accuracy.median <= at.trivial:
        return f"better {where}, but not than a trivial reader"
    return f"{'better' if test.difference > 0 else 'worse'} {where}"


def seeds_needed(standings: Sequence[Standing]) -> int:
    """The number of seeds each scheme needs so that adjusted tests against one reference can be significant."""
    tests = (len(standings) - 1) * (1 + len(ENDPOINTS))
    return next(n for n in range(2, 100) if tests * 2 / math.comb(2 * n, n) < ALPHA)
