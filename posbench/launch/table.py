"""What a sweep shows on stderr: a line for each change, and failures at the end."""

import logging
import time
from collections import Counter
from collections.abc import Mapping

from posbench.launch import states
from posbench.launch.plans import Plan
from posbench.launch.states import Status
from posbench.terminal import console, tables

logger = logging.getLogger(__name__)

_LINE_EVERY_SECONDS = 30.0


class Lines:
    """A line for each change, and every half a minute the counts and what runs."""

    def __init__(self, todo: list[Plan]) -> None:
        self.todo = todo
        self.before: dict[str, Status] = {}
        self.next_time = time.monotonic() + _LINE_EVERY_SECONDS

    def show(self, status: Mapping[str, Status]) -> None:
        for job in self.todo:
            now = status[job.id]
            if now != self.before.get(job.id, states.WAITING):
                named = job.id if now.name == "done" else f"{job.id} [{_own(job, self.todo)}]"
                logger.info("%s %s%s", named, now.name, _details(job, now))
        self.before = dict(status)
        if time.monotonic() >= self.next_time:
            self.next_time = time.monotonic() + _LINE_EVERY_SECONDS
            logger.info("%s", counts(status))
            for job in self.todo:
                if status[job.id] == states.RUNNING:
                    step, loss = states.progress(job)
                    told = "-" if loss is None else f"{loss:.3f}"
                    logger.info("  %s: step %s/%s, loss %s", job.id, step, job.config.training.steps, told)


def counts(status: Mapping[str, Status]) -> str:
    """`4 of 6 runs done, 2 running`."""
    counted = Counter(one.name for one in status.values())
    others = "".join(f", {number} {name}" for name, number in counted.items() if name != "done")
    return f"{counted['done']} of {len(status)} runs done{others}"


def show_failures(todo: list[Plan], status: Mapping[str, Status]) -> None:
    """Print a table of the jobs that are not done, and name values whose every run failed."""
    made = tables.table(console.stderr, "Not done")
    for heading in ("run", "with", "status", "reason", "message"):
        made.add_column(heading, overflow="fold")
    for job in todo:
        now = status[job.id]
        if now.name != "done":
            made.add_row(job.id, _own(job, todo), now.name, now.reason or "", now.message or "")
    console.stderr.print(made)
    for value, number in poisoned(todo, status).items():
        console.stderr.print(f"All {number} runs with {value} failed.")


def poisoned(todo: list[Plan], status: Mapping[str, Status]) -> dict[str, int]:
    """Overrides whose runs all failed (two or more) while others did not, with the number of runs."""
    with_override: dict[str, list[str]] = {}
    for job in todo:
        for override in job.overrides:
            with_override.setdefault(override, []).append(status[job.id].name)
    total = len(todo)
    return {
        override: len(names)
        for override, names in with_override.items()
        if 2 <= len(names) < total and set(names) == {"failed"}
    }


def _own(job: Plan, todo: list[Plan]) -> str:
    """The overrides that tell a job from the others."""
    common = set.intersection(*(set(one.overrides) for one in todo))
    return " ".join(override for override in job.overrides if override not in common or len(todo) == 1)


def _details(job: Plan, now: Status) -> str:
    if now.name == "done":
        row = states.in_distribution(job)
        if row is not None and row.accuracy is not None:
            return f": {row.accuracy:.1%} of tokens right at problem length {row.problem_length}"
        return "" if row is None else f": {row.nll:.4f} nats/token at {job.config.training.train_length} tokens"
    return f" ({now.reason}): {now.message or ''}" if now.reason else ""
