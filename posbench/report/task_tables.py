"""The tables of a task, and its answer in words: who learned it first, how far that goes second."""

import math
from collections.abc import Sequence

from posbench import tasks
from posbench.evaluation.answers import GATE, TRAINED, Place
from posbench.report import tables
from posbench.report.answer import few_seeds
from posbench.report.comparison import standing
from posbench.report.comparison.load import Group
from posbench.report.comparison.standing import ENDPOINTS, At, Spread, Standing, Tested
from posbench.report.comparison.statistics import SEEDS_FOR_A_CLAIM
from posbench.report.tables import Table, Value
from posbench.run_folder.rows import PLAIN

NOT_LEARNED = "not learned"
GATE_SAID = f"{100 * GATE:g} %"


def main_tables(group: Group, found: list[Standing]) -> list[Table]:
    """The tables of the terminal: seeds that learned, accuracy by length, whole answers, and the tests."""
    shown = [_learned(group, found), _exact(found)]
    shown += [_against(group, found)] if any(one.against for one in found) else []
    return [table.filled() for table in shown if table.rows]


def more_tables(found: list[Standing]) -> list[Table]:
    """The tables of the written report only."""
    return [table.filled() for table in (_variants(found), _changed(found)) if table.rows]


def answer(found: list[Standing]) -> list[str]:
    """Two to four sentences: who learned, who did not, and the order at the first endpoint with a number."""
    ranked = [one for one in found if one.ranked]
    unlearned = [one for one in found if not one.ranked and one.seeds]
    learned = ", ".join(f"{one.scheme.label} {one.learned} of {one.seeds}" for one in ranked)
    others = ", ".join(f"{one.scheme.label}{_at_longest(one)}" for one in unlearned)
    sentences = [
        f"Seeds that learned: {learned}." if ranked else "",
        f"Not learned, and so not ranked (tokens right at the longest trained length): {others}." if others else "",
        _beyond(ranked),
        few_seeds({one.scheme.label: one.seeds for one in ranked or found if one.seeds}),
    ]
    return [sentence for sentence in sentences if sentence]


def _beyond(ranked: list[Standing]) -> str:
    for ratio in ENDPOINTS:
        at = [(one, one.at.get(Place("", ratio, 0))) for one in ranked]
        known = sorted(
            ((spot.accuracy.median, one.scheme.label) for one, spot in at if spot and spot.accuracy), reverse=True
        )
        if known:
            undefined = [one.scheme.label for one, spot in at if spot and spot.status == "undefined"]
            each = ", ".join(f"{label} {_percent(median)}" for median, label in known)
            none = f"; undefined there: {', '.join(undefined)}" if undefined else ""
            trivial = next((spot.trivial for _, spot in at if spot and spot.trivial is not None), None)
            floor = "" if trivial is None else f"; a trivial reader {_percent(trivial)}"
            return f"Tokens right at {ratio:g} times that length, median over all seeds: {each}{none}{floor}."
    return ""


# -- for a paper -------------------------------------------------------------------------------------------------------


def for_paper(found: list[Standing]) -> Table:
    """Who learned, token accuracy and whole answers at the longest trained length and its doublings."""
    places = [place for place in columns_of(found) if not place.offset and math.log2(place.ratio).is_integer()]
    columns = ["scheme", "learned", *_both_headings(places)]
    rows = []
    for one in found:
        count = Value(f"{one.learned}/{one.seeds}" if one.seeds else "")
        rows.append([Value(one.scheme.label), count, *_both(one, places)])
    for name, *cells in _floors(found, places):
        rows.append([name, Value(""), *(cell for value in cells for cell in (value, Value("")))])
    return Table("", columns, rows).filled()


def caption_for_paper(group: Group, found: list[Standing]) -> str:
    title = _title(group)
    several = any("[" in value.text for row in for_paper(found).rows for value in row)
    right = f"% of answer tokens right{', median [least-most] over all seeds' if several else ''}"
    return (
        f"{title[:1].upper()}{title[1:]}. Learned: seeds with a token accuracy of at least {GATE_SAID} at every "
        f"trained length. {right}, by multiples of the longest trained problem; whole: % of problems whose every token "
        f"is right.{_floors_said(group, found)}"
    )


# -- tables ------------------------------------------------------------------------------------------------------------


def columns_of(found: Sequence[Standing]) -> list[Place]:
    """The places in the tables by length: the longest trained problems, longer ones, shifted ones."""
    return [place for place in standing.places(found) if not place.variant and place.ratio >= 1]


def heading(place: Place) -> str:
    """2x; 1x shifted by 64."""
    return f"{place.ratio:.3g}x" + (f" shifted by {place.offset}" if place.offset else "")


def _learned(group: Group, found: list[Standing]) -> Table:
    places = columns_of(found)
    columns = ["scheme", "learned", f"steps to {GATE_SAID}", *map(heading, places)]
    rows = [
        [Value(one.scheme.label), learned(one), steps(one), *(accuracy(one, place) for place in places)]
        for one in found
    ]
    rows += [[name, Value(""), Value(""), *cells] for name, *cells in _floors(found, places)]
    note = (
        f"learned: seeds whose token accuracy is at least {GATE_SAID} at every trained length tested, with the 95 % "
        "interval of their share (Clopper-Pearson); a seed that diverged has not. steps: to the first validation, at "
        "the longest trained length, that reached it; median over seeds, with those that never got there as the "
        "slowest; - where that is most. Accuracy: % of answer tokens right, each predicted from the true ones before "
        "it; median [least-most] over all seeds (one that diverged has none right). Multiples of the longest trained "
        "problem; shifted: all positions moved on, the problems no longer. If fewer than half of the seeds learned, "
        "only the accuracy at 1x is shown, and nothing is ranked; ranked by the mean of the medians beyond "
        f"1x.{_floors_said(group, found)}"
    )
    return Table(f"{_title(group)}: token accuracy, %", columns, rows, note, _spare(places, 3))


def _exact(found: list[Standing]) -> Table:
    places = columns_of(found)
    rows = [[Value(one.scheme.label), *(exact_match(one, place) for place in places)] for one in found if one.ranked]
    note = (
        "% of problems whose every answer token is right, which is what greedy decoding gets right; median "
        "[least-most] over all seeds."
    )
    return Table("Whole answers right, %", ["scheme", *map(heading, places)], rows, note, _spare(places, 1))


def _against(group: Group, found: list[Standing]) -> Table:
    label = standing.reference(group).label
    ratios = [f"at {ratio:g}x" for ratio in ENDPOINTS]
    columns = ["scheme", "learned", "p", *(name for ratio in ratios for name in (ratio, "p")), "verdict"]
    rows = []
    for one in found:
        if one.against is None:
            continue
        tests = [one.against.learned, *(one.against.accuracy.get(ratio) for ratio in ENDPOINTS)]
        cells = [cell for test in tests for cell in (_points(test), _p(test))]
        rows.append([Value(one.scheme.label), *cells, Value(one.against.verdict)])
    note = (
        f"Differences from {label} in percentage points. learned: of the share of seeds, Fisher's exact test. "
        "Accuracy: of means over all seeds, learned or not (one that diverged has none right); exact permutation test, "
        "two-sided, seeds not paired. All were tested on the same problems: it speaks of other seeds on these. All p "
        "of this table are adjusted together (Holm). n too small: no outcome of so many seeds could have a p below "
        f"{standing.ALPHA:g} then, which takes {standing.seeds_needed(found)} of each scheme. Better and worse take a "
        f"difference of {100 * standing.LEAST:g} point; not resolved is not equal. Verdicts need {SEEDS_FOR_A_CLAIM} "
        "seeds."
    )
    return Table(f"Against {label}", columns, rows, note, (6, 4, 2, 1))


def _variants(found: list[Standing]) -> Table:
    own = [place for place in standing.places(found) if place.variant]
    spots = sorted({place[1:] for place in own}, key=lambda spot: (spot[1], spot[0]))
    names = sorted({place.variant for place in own}, key=_natural)
    rows = []
    for one in found:
        for name in names if one.ranked else []:
            places = [Place(name, *spot) for spot in spots]
            rows.append([Value(one.scheme.label), Value(name), *_both(one, places)])
    heads = _both_headings([Place("", *spot) for spot in spots])
    note = (
        "The task with an option that was never trained on: % of answer tokens right, and of whole answers; median "
        "[least-most] over all seeds of the schemes that learned the task as it was trained. Exploratory."
    )
    return Table("Variants of the task", ["scheme", "variant", *heads], rows, note)


def _changed(found: list[Standing]) -> Table:
    spots = {place for one in found for place in one.at if place.kind != PLAIN and place.ratio >= 1}
    places = sorted(
        {Place("", spot.ratio, spot.offset) for spot in spots}, key=lambda place: (place.offset, place.ratio)
    )
    rows = []
    for one in found:
        kinds = sorted({place.kind for place in one.at} - {PLAIN}) if one.ranked else []
        for kind in [PLAIN, *kinds] if kinds else []:
            cells = _both(one, [place._replace(kind=kind) for place in places])
            rows.append([Value(one.scheme.label), Value("as trained" if kind == PLAIN else kind), *cells])
    note = (
        "The same problems, answered by the model with a context extension or with attention narrowed to as many "
        "tokens as it was trained on: % of answer tokens right, and of whole answers; median [least-most] over all "
        "seeds. Exploratory."
    )
    return Table("Extensions and windows, %", ["scheme", "model", *_both_headings(places)], rows, note)


def _natural(name: str) -> tuple[str, float, str]:
    """Options of one name in the order of their numbers."""
    key, _, value = name.partition("=")
    try:
        return key, float(value), value
    except ValueError:
        return key, math.inf, value


# -- cells -------------------------------------------------------------------------------------------------------------


def learned(one: Standing) -> Value:
    """`4 of 5 (28-99 %)`, with what is not known beside it."""
    if one.interval is None:
        return Value(", ".join(f"{count} {outcome}" for outcome, count in one.outcomes.items()))
    low, high = one.interval
    lacking = len(one.scheme.runs) - one.seeds
    open_ = f", {lacking} not known" if lacking else ""
    return Value(f"{one.learned} of {one.seeds} ({100 * low:.0f}-{100 * high:.0f} %){open_}", one.learned / one.seeds)


def steps(one: Standing) -> Value:
    if not one.ranked or one.steps is None:
        return Value("")
    return Value("-") if math.isinf(one.steps) else tables.whole(one.steps)


def accuracy(one: Standing, place: Place) -> Value:
    """Of a scheme at a place; of one that is not ranked only that, and how accurate it is at the longest trained."""
    if not one.ranked:
        return Value(f"{NOT_LEARNED}{_at_longest(one)}" if place == TRAINED and one.seeds else "")
    return _cell(one.at.get(place), "accuracy")


def exact_match(one: Standing, place: Place) -> Value:
    return _cell(one.at.get(place), "exact_match") if one.ranked else Value("")


def _cell(at: At | None, column: str) -> Value:
    if at is None:
        return Value("")
    return spread(getattr(at, column)) if at.status == "ok" else Value(at.status.replace("_", " "))


def spread(found: Spread | None) -> Value:
    """Percent: `97.2 [91.0-99.8]`."""
    if found is None:
        return Value("")
    low, median, high = (f"{100 * value:.1f}" for value in (found.low, found.median, found.high))
    return Value(median if low == high else f"{median} [{low}-{high}]", 100 * found.median)


def _both(one: Standing, places: Sequence[Place]) -> list[Value]:
    """Token accuracy and whole answers at each place."""
    return [cell for place in places for cell in (accuracy(one, place), exact_match(one, place))]


def _both_headings(places: Sequence[Place]) -> list[str]:
    return [head for place in places for head in (heading(place), f"{heading(place)} whole")]


def _floors(found: Sequence[Standing], places: Sequence[Place]) -> list[list[Value]]:
    """A row for the trivial reader and one for guessing, their token accuracy at each place; none of earlier rows."""
    rows = []
    for name, column in (("trivial reader", "trivial"), ("guessing", "chance")):
        shares = standing.known_at(found, column)
        if any(place in shares for place in places):
            rows.append([Value(name), *(tables.percent(shares.get(place)) for place in places)])
    return rows


def _floors_said(group: Group, found: Sequence[Standing]) -> str:
    """A sentence on the trivial reader and on guessing; empty if the rows lack them."""
    if group.task is None or group.task not in tasks.names() or not _floors(found, columns_of(found)):
        return ""
    reader = tasks.load(group.task).trivial_reader
    return (
        f" Trivial reader: one that {reader}; it sees the right tokens before each. Guessing: among all answer tokens."
    )


def _at_longest(one: Standing) -> str:
    """` (82 %)`, the median at the longest trained length; empty if no seed was tested there."""
    return "" if one.at_longest is None else f" ({_percent(one.at_longest)})"


def _percent(share: float) -> str:
    """Rounded down, so that 99 % is what passes the gate."""
    return f"{math.floor(round(100 * share, 6))} %"


def _points(test: Tested | None) -> Value:
    return Value("") if test is None else Value(f"{100 * test.difference:+.1f}", 100 * test.difference)


def _p(test: Tested | None) -> Value:
    if test is None:
        return Value("")
    return Value("n too small") if test.too_small else tables.p_value(test.p)


def _title(group: Group) -> str:
    trained = (answer for run in group.runs if (answer := run.answers.at.get(TRAINED)))
    known = sorted(length for answer in trained if (length := answer.row.problem_length) is not None)
    return f"{group.task}, trained on problems up to {known[-1]}" if known else str(group.task)


def _spare(places: list[Place], first: int) -> tuple[int, ...]:
    """Columns a narrow terminal leaves out: the trained length and the endpoints are kept longest."""
    important = [Place("", ratio, 0) for ratio in (*ENDPOINTS[::-1], 1.0)]
    least = [at for at, place in enumerate(places) if place not in important]
    return tuple(first + at for at in [*least, *(places.index(place) for place in important[:1] if place in places)])
