"""What a sweep shows on stderr: a live table of its cells on a terminal, plain lines otherwise; failures at the end."""

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping

from rich import box
from rich.live import Live
from rich.table import Table
from rich.text import Text

from posbench import console, exits
from posbench.sweep import cells
from posbench.sweep.cells import Cell, Status
from posbench.sweep.pool import Show

logger = logging.getLogger(__name__)

_TABLE_EVERY_SECONDS = 0.5
_LINE_EVERY_SECONDS = 30.0
_COLOURS = {"running": "cyan", "done": "green", "failed": "red", "stopped": "yellow"}
_FRAME_LINES = 6  # of a table beside its rows


@contextlib.contextmanager
def shown(todo: list[Cell]) -> Iterator[Show]:
    """Something to call with the status of every cell, as often as one likes."""
    if not console.stderr.is_terminal:
        yield _Lines(todo).show
        return
    with Live(console=console.stderr, auto_refresh=False, transient=True) as live:
        yield _Live(todo, live).show
    console.stderr.print(live.renderable)  # the last picture stays


class _Live:
    def __init__(self, todo: list[Cell], live: Live) -> None:
        self.todo, self.live = todo, live
        self.next_time = 0.0
        self.before: dict[str, Status] = {}

    def show(self, status: Mapping[str, Status]) -> None:
        if time.monotonic() < self.next_time and status == self.before:
            return
        self.next_time, self.before = time.monotonic() + _TABLE_EVERY_SECONDS, dict(status)
        self.live.update(table(self.todo, status, console.stderr.height - _FRAME_LINES), refresh=True)


class _Lines:
    def __init__(self, todo: list[Cell]) -> None:
        self.todo = todo
        self.before: dict[str, Status] = {}
        self.next_time = time.monotonic() + _LINE_EVERY_SECONDS

    def show(self, status: Mapping[str, Status]) -> None:
        for cell in self.todo:
            now = status[cell.id]
            if now != self.before.get(cell.id, cells.WAITING):
                logger.info("%s %s%s", cell.id, now.name, _details(cell, now))
        self.before = dict(status)
        if time.monotonic() >= self.next_time:
            self.next_time = time.monotonic() + _LINE_EVERY_SECONDS
            logger.info("%s", counts(status))
            for cell in self.todo:
                if status[cell.id] == cells.RUNNING:
                    step, loss, _ = _numbers(cell, cells.RUNNING)
                    logger.info("  %s: step %s, loss %s", cell.id, step, loss or "-")


def table(todo: list[Cell], status: Mapping[str, Status], rows: int) -> Table:
    """All cells where they fit into so many rows, else those that run or failed."""
    common = set.intersection(*(set(cell.overrides) for cell in todo))
    if len(todo) > rows:
        todo = [cell for cell in todo if status[cell.id].name not in ("waiting", "done")][: max(1, rows)]
    made = Table(box=box.SIMPLE, expand=True, caption=counts(status), caption_justify="left")
    for heading, justify in {"run": "left", "status": "left", "step": "right", "loss": "right", "nll": "right"}.items():
        made.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    made.add_column("", overflow="ellipsis", no_wrap=True, ratio=1)  # gives way to the others
    for cell in todo:
        now = status[cell.id]
        name = Text(now.name, style=_COLOURS.get(now.name, "dim"))
        why = ": ".join(text for text in (now.reason, now.message) if text)
        what = " ".join(o for o in cell.overrides if o not in common and not o.startswith(("encoding=", "seed=")))
        made.add_row(Text(cell.id), name, *_numbers(cell, now), Text(exits.one_line(why or what)))
    return made


def counts(status: Mapping[str, Status]) -> str:
    """`4 of 6 runs done, 2 running`."""
    counted = Counter(one.name for one in status.values())
    others = "".join(f", {number} {name}" for name, number in counted.items() if name != "done")
    return f"{counted['done']} of {len(status)} runs done{others}"


def show_failures(todo: list[Cell], status: Mapping[str, Status]) -> None:
    """Print a table of the cells that are not done, and name the values of an axis that never worked."""
    made = Table(box=box.SIMPLE, title="Not done", title_justify="left")
    for heading in ("run", "status", "reason", "message"):
        made.add_column(heading, overflow="fold")
    for cell in todo:
        now = status[cell.id]
        if now.name != "done":
            made.add_row(cell.id, now.name, now.reason or "", exits.one_line(now.message or ""))
    console.stderr.print(made)
    for value, number in poisoned(todo, status).items():
        console.stderr.print(f"All {number} runs with {value} failed.")


def poisoned(todo: list[Cell], status: Mapping[str, Status]) -> dict[str, int]:
    """Overrides whose every run failed (two or more), while runs without them did not; with the number of runs."""
    with_override: dict[str, list[str]] = {}
    for cell in todo:
        for override in cell.overrides:
            with_override.setdefault(override, []).append(status[cell.id].name)
    total = len(todo)
    return {
        override: len(names)
        for override, names in with_override.items()
        if 2 <= len(names) < total and set(names) == {"failed"}
    }


def _details(cell: Cell, now: Status) -> str:
    if now.name == "done":
        nll = cells.nll_in_distribution(cell)
        return "" if nll is None else f": {nll:.4f} nats/token at {cell.config.training.train_length} tokens"
    return f" ({now.reason}): {exits.one_line(now.message or '')}" if now.reason else ""


def _numbers(cell: Cell, now: Status) -> tuple[str, str, str]:
    """Step, loss and nll as they are shown."""
    if now == cells.WAITING:
        return "", "", ""
    total = cells.total_steps(cell)
    step, loss = (total, None) if now.name == "done" else cells.progress(cell)
    nll = cells.nll_in_distribution(cell) if now.name == "done" else None
    return f"{step}/{total}", "" if loss is None else f"{loss:.3f}", "" if nll is None else f"{nll:.4f}"
