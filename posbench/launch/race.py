"""`race=true`: a sweep adds seeds look by look, and a scheme stops when more of them tell nothing.

The rules stand in `posbench.report.comparison.race`: this starts the runs that they ask for.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from posbench.config.overrides import value
from posbench.errors import PosbenchError, UserError
from posbench.launch import tuning
from posbench.launch.plans import Plan
from posbench.launch.states import FINAL, Status
from posbench.report.comparison import load, race, summary
from posbench.report.comparison.race import FEWEST, LOOKS, MOST, Race

logger = logging.getLogger(__name__)


def looks_of(own: Mapping[str, str]) -> tuple[int, ...]:
    """Seeds at each look, from a sweep's own arguments; none without `race=true`.

    Raises:
        UserError: looks that are no growing numbers, or without a race.
    """
    asked = value(own.get("race", "false"))
    if not isinstance(asked, bool):
        raise UserError(f"race is '{own['race']}': expected true or false")
    given = own.get("race.looks")
    if not asked:
        if given is not None:
            raise UserError("race.looks goes with race=true")
        return ()
    try:
        found: Any = LOOKS if given is None else value(f"[{given.strip('[]')}]")
        return race.check(found)
    except ValueError:
        raise UserError(
            f"race.looks is '{given}': expected growing numbers of seeds from {FEWEST} to {MOST}, such as [3,5,8,12]"
        ) from None


class Racing:
    """The runs of a race, in the order in which its looks ask for them.

    Args:
        todo: what the sweep names; of its seeds the lowest is the first, the others follow one by one.

    Raises:
        UserError: a race has nothing to compare, or may not compare what is named.
    """

    def __init__(self, todo: Sequence[Plan], looks: tuple[int, ...]) -> None:
        schemes: dict[str, Plan] = {}
        for job in todo:
            schemes.setdefault(tuning.group(job), job)
        _refuse(list(schemes.values()))
        first = min(job.config.seed for job in todo)
        each = [[job.with_seed(first + n) for n in range(looks[-1])] for job in schemes.values()]
        self.race = Race(looks, load.REFERENCE, tuple(tuple(plan.id for plan in plans) for plans in each))
        self._path = each[0][0].folder.parent / race.RECORD
        self._plans = {plan.id: plan for plans in each for plan in plans}
        configs = [job.config for job in schemes.values()]
        named = [i for i, config in enumerate(configs) if config.encoding.name == load.REFERENCE]
        self._reference = min(named, key=lambda i: not load.by_default(configs[i]))
        self._active = set(range(len(each)))  # with the reference
        self._look = 0  # the one whose runs are being made, from 0
        self._over = False

    def record(self) -> None:
        """Write what decides, before the first run. Raises UserError if the study has another race."""
        race.write(self._path, self.race)

    @property
    def all(self) -> list[Plan]:
        """Every run that there may be."""
        return list(self._plans.values())

    @property
    def first(self) -> list[Plan]:
        """The runs of the first look."""
        return self._due(0, self._active)

    def among(self, ids: Iterable[str]) -> list[Plan]:
        """The runs of these names."""
        return [self._plans[name] for name in ids]

    def more(self, status: Mapping[str, Status]) -> list[Plan]:
        """Runs to be added to those that have a status; none if nothing can be added now.

        While a look's last runs are made, it adds one of the next look, so that no processor is idle: first one of the
        reference, which is needed unless all schemes stop. Such a run counts only if its look comes.
        """
        while not self._over:
            due = self._due(self._look, self._active)
            if not all(status[plan.id].name in FINAL for plan in due):
                return self._ahead(status)
            self._advance()
            if new := [plan for plan in self._due(self._look, self._active) if plan.id not in status]:
                return [] if self._over else new
        return []

    def _due(self, look: int, schemes: Iterable[int]) -> list[Plan]:
        """The runs that a look adds, seed by seed, so that every scheme has some early."""
        begin = self.race.looks[look - 1] if look else 0
        seeds = range(begin, self.race.looks[look])
        return [self._plans[self.race.runs[scheme][seed]] for seed in seeds for scheme in sorted(schemes)]

    def _ahead(self, status: Mapping[str, Status]) -> list[Plan]:
        if self._look + 1 == len(self.race.looks):
            return []
        likely = [self._reference] if self._look == 0 else sorted(self._active, key=lambda i: i != self._reference)
        new = (plan for scheme in likely for plan in self._due(self._look + 1, [scheme]) if plan.id not in status)
        return [plan for plan, _ in zip(new, range(1), strict=False)]

    def _advance(self) -> None:
        """Go to the next look, or end."""
        raced, course = self._course()
        if raced is None:
            self._over = True
            return
        place = {names: number for number, names in enumerate(self.race.runs)}
        for label, stop in course.stops.items():
            if stop.look == self._look + 1:
                logger.info("race: %s at %d seeds: %s", label, stop.seeds, race.EXITS[stop.why])
        # Of a race that is continued, later looks may be complete, too. A scheme without a run folder always failed.
        stopped = {label for label, stop in course.stops.items() if stop.look <= self._look + 1}
        self._active = {place[names] for label, names in raced.runs.items() if label not in stopped}
        last = self._look + 1 == len(self.race.looks)
        self._over = last or course.looks <= self._look or self._active == {self._reference}
        if not self._over:
            self._look += 1

    def _course(self) -> tuple[race.Raced | None, race.Course]:
        """How the race went so far; None if none of its runs has begun."""
        runs = [load.read(plan.folder) for plan in self._plans.values() if (plan.folder / "run.json").is_file()]
        found = [(raced, summary.course(group, raced)) for group in load.groups(runs) for raced in race.of(group)]
        if len(found) > 1:
            raise PosbenchError("the texts of these runs differ, so they may not be compared: see 'posbench report'")
        return found[0] if found else (None, race.Course(0, {}, {}, {}))


def _refuse(schemes: list[Plan]) -> None:
    studies = {job.folder.parent for job in schemes}
    settings = [load.asked(job.config) for job in schemes]
    differing = sorted({key for one in settings for key in one if one.get(key) != settings[0].get(key)})
    if any(job.config.data.task is not None for job in schemes):
        raise UserError("race=true is for text: seeds of tasks are compared by exact tests, all at once")
    if differing or len(studies) > 1:
        said = ", ".join(differing) or "study"
        raise UserError(f"a race compares encodings at equal settings in one study; these differ in {said}")
    if len(schemes) < 2 or all(job.config.encoding.name != load.REFERENCE for job in schemes):
        raise UserError(f"a race compares encodings with {load.REFERENCE}: expected encoding={load.REFERENCE},alibi")
