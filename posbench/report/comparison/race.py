"""A race: seeds are added in looks that were planned before the first run, and a scheme stops when more tell nothing.

Every look spends an equal part of the chance of a wrong word. So words are wrong in at most 5 % of races, whatever made
a scheme stop (Bonferroni, over looks). An interval at a look's level is a repeated confidence interval, which holds at
whatever look a scheme stopped (Jennison & Turnbull, 1989, "Interim Analyses: The Repeated Confidence Interval
Approach"). A plain one would not: a scheme stops when its seeds happen to agree.

`race.json` in the study's folder holds everything that decides. It is written before the first run.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from posbench import files
from posbench.errors import UserError
from posbench.evaluation.intervals import Interval, with_seed_variance
from posbench.report.comparison import claims, load
from posbench.report.comparison.claims import ALPHA, LEAST, MARGIN
from posbench.report.comparison.judgement import Judged
from posbench.report.comparison.load import Group
from posbench.run_folder import jsonl

RECORD = "race.json"
LOOKS = (3, 5, 8, 12)  # seeds
FEWEST, MOST = 2, 1000  # seeds of a look
FUTILE = 0.1  # chance of a word at the last look, below which a scheme stops

Exit = Literal["settled", "futile", "documents", "no verdict", "last look"]
EXITS: dict[Exit, str] = {
    "settled": "settled",
    "futile": "more seeds are unlikely to settle it",
    "documents": "it takes more documents, not more seeds",
    "no verdict": "no verdict, however many seeds",
    "last look": "not settled by the last look",
}


@dataclasses.dataclass(frozen=True)
class Race:
    """What was decided before the first run."""

    looks: tuple[int, ...]  # seeds of each scheme, ascending
    reference: str
    runs: tuple[tuple[str, ...], ...]  # of each scheme the names of its run folders, in the order in which seeds count
    runs_before: int = dataclasses.field(default=0, compare=False)  # that had begun when it was recorded

    @property
    def alpha(self) -> float:
        """The chance of any wrong word that each look may have."""
        return ALPHA / len(self.looks)

    @property
    def content(self) -> dict[str, Any]:
        """What `race.json` holds."""
        return {
            "schema": 1,
            "looks": list(self.looks),
            "alpha": ALPHA,
            "alpha_of_a_look": self.alpha,
            "least": LEAST,
            "margin_at_1x": MARGIN,
            "futile_below": FUTILE,
            "reference": self.reference,
            "schemes": [list(names) for names in self.runs],
            "runs_before": self.runs_before,
        }


def write(path: Path, race: Race) -> None:
    """Record a race before its first run.

    Raises:
        UserError: the study has another race.
    """
    before = read(path)
    if before is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        begun = sum((path.parent / name / "run.json").is_file() for names in race.runs for name in names)
        files.write(path, json.dumps(dataclasses.replace(race, runs_before=begun).content, indent=2).encode() + b"\n")
    elif before != race:
        differs = "looks" if before.looks != race.looks else "schemes or settings"
        raise UserError(
            f"{path} has another race, of other {differs}: what decides is settled before the first run. "
            f"Race in another folder (study=NAME), or repeat that race as it was"
        )


def read(path: Path) -> Race | None:
    """The race of a study; None if it has none.

    Raises:
        UserError: the file is not what posbench writes.
    """
    if not path.exists():
        return None
    try:
        content = json.loads(files.read(path, jsonl.LARGEST))
        looks, schemes = content["looks"], content["schemes"]
        runs = tuple(tuple(names) for names in schemes)
        race = Race(tuple(looks), content["reference"], runs, content["runs_before"])
        check(race.looks)
        names = [name for names in race.runs for name in names]
        usual = all(isinstance(name, str) for name in names) and len(set(names)) == len(names)
        usual = usual and type(race.runs_before) is int and 0 <= race.runs_before <= len(names)
        if not usual or content != race.content or any(len(each) != looks[-1] for each in race.runs):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{path} is not a race as this version of posbench records it") from None
    return race


def check(looks: Iterable[Any]) -> tuple[int, ...]:
    """Seeds at each look. Raises ValueError if they are no growing numbers of seeds."""
    found = tuple(looks)
    if not found or not all(type(seeds) is int and FEWEST <= seeds <= MOST for seeds in found):
        raise ValueError
    if list(found) != sorted(set(found)):
        raise ValueError
    return found


# -- the course of a race ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Stop:
    """Where a scheme stopped."""

    look: int  # from 1
    seeds: int
    why: Exit


@dataclasses.dataclass(frozen=True)
class Course:
    """What the looks of a race found so far."""

    looks: int  # that are complete
    seeds: dict[str, int]  # by label: those that count, up to the last complete look or to where the scheme stopped
    stops: dict[str, Stop]  # by label
    judged: dict[str, Judged]  # by label: at the look at which it stopped, else, as of the reference, at the last one


def course(
    looks: tuple[int, ...],
    reference: str,
    ended: Mapping[str, int],
    look_at: Callable[[Mapping[str, int]], tuple[Judged, Mapping[str, bool]]],
) -> Course:
    """Follow a race through its complete looks: those at which the runs of all schemes still in it have ended.

    Args:
        reference: its label.
        ended: by label, with the reference: the number of seeds, counted from the first, that have ended.
        look_at: given the number of seeds of each label, returns what joint intervals say, and for each label without
            words whether it will never have any.
    """
    found = Course(0, {}, {}, {})
    for number, count in enumerate(looks, start=1):
        active = [label for label in ended if label not in found.stops]
        if active == [reference] or any(ended[label] < count for label in active):
            break
        seeds = found.seeds | dict.fromkeys(active, count)
        judged, never = look_at(seeds)
        stops = dict(found.stops)
        for label in (label for label in active if label != reference):
            why = _exit(judged, label, looks[-1], never.get(label, False))
            if why is None and number == len(looks):
                why = "last look"
            if why is not None:
                stops[label] = Stop(number, count, why)
        found = Course(number, seeds, stops, found.judged | dict.fromkeys(active, judged))
    return found


def _exit(judged: Judged, label: str, last: int, never: bool) -> Exit | None:
    """Why a scheme stops; None if it goes on."""
    if label not in judged.words:
        return "no verdict" if never else None
    at_one, beyond = judged.words[label]
    of_nll, of_rise = judged.differences[label]
    level = judged.levels[label]
    open_ = [(of_nll, MARGIN)] * (at_one == "open") + [(of_rise, LEAST)] * (beyond == "open")
    if not open_:
        return "settled"
    if any(chance(one, last, level, margin) >= FUTILE for one, margin in open_):
        return None
    return "documents" if all(chance(one, MOST, level, margin) < FUTILE for one, margin in open_) else "futile"


def chance(found: Interval, seeds: int, level: float, margin: float) -> float:
    """The chance that a difference has a word once there are so many seeds, given those there are.

    Predictive power (Spiegelhalter, Freedman & Blackburn, 1986, "Monitoring clinical trials: conditional or predictive
    power?"): the mean of all seeds is normal around the present one, with the variance over seeds times (1/n - 1/N).

    Args:
        found: the interval as it is.
        level: of the interval that will decide.
        margin: a difference that is shown to lie within it has a word, too.
    """
    from scipy import special

    if found.of_seed is None or found.seeds >= seeds:
        return 0.0
    (variance, df), (units, both) = found.of_seed, found.text
    later = dataclasses.replace(found, seeds=seeds, text=(units, both * found.seeds / seeds))
    half = with_seed_variance(later, variance, df + seeds - found.seeds).half_at(level)
    sd = math.sqrt(variance * (1 / found.seeds - 1 / seeds))

    def below(value: float) -> float:
        if not sd:
            return float(found.mean < value)
        return float(special.ndtr((value - found.mean) / sd))

    apart = max(half, claims.LEAST)
    within = max(0.0, below(margin - half) - below(half - margin))
    return min(1.0, below(-apart) + 1 - below(apart) + within)


# -- the runs of a race ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Raced:
    """A race whose runs are among those of a group."""

    race: Race
    path: Path
    runs: dict[str, tuple[str, ...]]  # by label, the reference too: names of run folders in the order of seeds
    reference: str  # its label; empty if its runs are not among them, as in a report on a part of the race
    ended: dict[str, int]  # by label, the number of seeds, counted from the first, that have ended

    def counted(self, group: Group, seeds: Mapping[str, int]) -> Group:
        """The group with so many seeds of each scheme, in their order; a scheme that is not named keeps all."""
        kept = {name for label, number in seeds.items() for name in self.runs[label][:number]}
        schemes = [
            dataclasses.replace(one, runs=[run for run in one.runs if run.folder.name in kept])
            if one.label in seeds
            else one
            for one in group.schemes
        ]
        return dataclasses.replace(group, schemes=schemes)


def of(group: Group) -> list[Raced]:
    """The races of a group's studies; a scheme belongs to the first that has it.

    Raises:
        UserError: a record is not what posbench writes, or the group compares with another scheme than the race does.
    """
    found: list[Raced] = []
    label_of = {(run.folder.parent, run.folder.name): one.label for one in group.schemes for run in one.runs}
    for study in load.studies(group.runs):
        race = read(study / RECORD)
        taken = {label for one in found for label in one.runs}
        runs: dict[str, tuple[str, ...]] = {}
        for names in race.runs if race else ():
            labels = {label for name in names if (label := label_of.get((study, name))) is not None}
            runs |= {label: names for label in labels - taken}
        if not race or not runs:
            continue
        reference = group.reference
        if reference and (reference.label not in runs or reference.name != race.reference):
            raise UserError(
                f"{study / RECORD} compares with {race.reference}, which was settled before the first run: "
                f"expected no other --reference, and no other runs of it"
            )
        ended = _ended(group, study)
        leading = {label: _leading(names, ended) for label, names in runs.items()}
        found.append(Raced(race, study / RECORD, runs, reference.label if reference else "", leading))
    return found


def _ended(group: Group, study: Path) -> set[str]:
    """Names of the runs of a study that are done or have failed, and so will not change unless they are repeated."""
    own = {run.folder.name for run in group.runs if run.record.get("status") in ("done", "failed")}
    cells = load.listed(study / "sweep.json", "cells")
    return own | {str(cell.get("id")) for cell in cells if cell.get("status") == "failed"}


def _leading(names: tuple[str, ...], ended: set[str]) -> int:
    return next((number for number, name in enumerate(names) if name not in ended), len(names))
