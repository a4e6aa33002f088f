"""What a sweep shows on stderr: a live table of its jobs on a terminal, plain lines otherwise; failures at the end."""

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping

from rich.live import Live
from rich.table import Table
from rich.text import Text

from posbench.launch import states
from posbench.launch.plans import Plan
from posbench.launch.pool import Show
from posbench.launch.states import Status
from posbench.terminal import console, exits, tables

logger = logging.getLogger(__name__)

_TABLE_EVERY_SECONDS = 0.5
_LINE_EVERY_SECONDS = 30.0
_COLOURS = {"running": "cyan", "done": "green", "failed": "red", "stopped": "yellow"}
_FRAME_LINES = 6  # of a table beside its rows


@contextlib.contextmanager
def shown(todo: list[Plan]) -> Iterator[Show]:
    """Return a callback that displays job statuses."""
    if not console.stderr.is_terminal:
        yield _Lines(todo).show
        return
    with Live(console=console.stderr, auto_refresh=False, transient=True) as live:
        yield _Live(todo, live).show
    console.stderr.print(live.renderable)  # the last picture stays


class _Live:
    def __init__(self, todo: list[Plan], live: Live) -> None:
        self.todo, self.live = todo, live
        self.next_time = 0.0
        self.before: dict[str, Status] = {}

    def show(self, status: Mapping[str, Status]) -> None:
        if time.monotonic() < self.next_time and status == self.before:
            return
        self.next_time, self.before = time.monotonic() + _TABLE_EVERY_SECONDS, dict(status)
        self.live.update(table(self.todo, status, console.stderr.height - _FRAME_LINES), refresh=True)


class _Lines:
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
                    step, loss, _ = _numbers(job, states.RUNNING)
                    logger.info("  %s: step %s, loss %s", job.id, step, loss or "-")


def table(todo: list[Plan], status: Mapping[str, Status], rows: int) -> Table:
    """All jobs if they fit into so many rows, else those that run or failed."""
    common = set.intersection(*(set(job.overrides) for job in todo))
    if len(todo) > rows:
        todo = [job for job in todo if status[job.id].name not in ("waiting", "done")][: max(1, rows)]
    made = tables.table(console.stderr, caption=counts(status))
    made.expand = True
    for heading, justify in {"run": "left", "status": "left", "step": "right", "loss": "right", "nll": "right"}.items():
        made.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    made.add_column("", overflow="ellipsis", no_wrap=True, ratio=1)  # gives way to the others
    for job in todo:
        now = status[job.id]
        name = Text(now.name, style=_COLOURS.get(now.name, "dim"))
        why = ": ".join(text for text in (now.reason, now.message) if text)
        what = " ".join(o for o in job.overrides if o not in common and not o.startswith(("encoding=", "seed=")))
        made.add_row(Text(job.id), name, *_numbers(job, now), Text(exits.one_line(why or what)))
    return made


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
            message = exits.one_line(now.message or "")
            made.add_row(job.id, _own(job, todo), now.name, now.reason or "", message)
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
    return exits.one_line(" ".join(override for override in job.overrides if override not in common or len(todo) == 1))


def _details(job: Plan, now: Status) -> str:
    if now.name == "done":
        row = states.in_distribution(job)
        if row is not None and row.accuracy is not None:
            return f": {row.accuracy:.1%} of tokens right at problem length {row.problem_length}"
        return "" if row is None else f": {row.nll:.4f} nats/token at {job.config.training.train_length} tokens"
    return f" ({now.reason}): {exits.one_line(now.message or '')}" if now.reason else ""


def _numbers(job: Plan, now: Status) -> tuple[str, str, str]:
    """Step, loss and nll as they are shown."""
    if now == states.WAITING:
        return "", "", ""
    total = job.config.training.steps
    step, loss = (total, None) if now.name == "done" else states.progress(job)
    nll = states.nll_in_distribution(job) if now.name == "done" else None
    return f"{step}/{total}", "" if loss is None else f"{loss:.3f}", "" if nll is None else f"{nll:.4f}"
