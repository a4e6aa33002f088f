"""The terminal: posbench's console, the log on stderr, and the progress of work."""

import contextlib
import functools
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.highlighter import NullHighlighter
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.table import Table

from posbench.terminal.exits import Escaped, escape_controls, is_quiet

logger = logging.getLogger(__name__)

LINE_EVERY_SECONDS = 10.0


class _Console(Console):
    """A console without markup and emoji codes: output is data. Control characters are
    escaped; line breaks stay.
    """

    def __init__(self, **options: Any) -> None:
        # COLUMNS=0 means that the width is unknown, which rich takes for a width
        environ = dict(os.environ)
        for name in ("COLUMNS", "LINES"):
            if not environ.get(name, "").strip("0"):
                environ.pop(name, None)
        super().__init__(_environ=environ, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                lines = map(escape_controls, segment.text.split("\n"))
                yield segment._replace(text="\n".join(lines))


# Makes a console on stdout. The width, colours and encoding are those at the time of
# the call.
stdout = functools.partial(_Console, markup=False, emoji=False, highlight=False)
stderr: Console = stdout(stderr=True)


def plural(count: int, noun: str) -> str:
    """Return `1 run`, `3 runs`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def table() -> Table:
    """Return an empty table: a line below its head."""
    return Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        pad_edge=False,
        collapse_padding=True,
        show_edge=False,
    )


def fitting_columns(
    widths: Sequence[int], spare: Sequence[int], room: int
) -> list[int]:
    """Return the numbers of the columns that fit into `room` characters. Those in
    `spare` are dropped in that order.
    """
    columns = list(range(len(widths)))
    needed = sum(widths) + 2 * (len(widths) - 1)
    for column in spare:
        if needed <= room:
            break
        columns.remove(column)
        needed -= widths[column] + 2
    return columns


def log_to_terminal() -> None:
    """Send posbench's log to stderr: through rich on a terminal, so that a live bar
    stays whole.
    """
    handler: logging.Handler
    if stderr.is_terminal:
        handler = RichHandler(
            console=stderr,
            show_path=False,
            show_level=False,
            highlighter=NullHighlighter(),
        )
        handler.setFormatter(Escaped("%(message)s"))
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(Escaped("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    root = logging.getLogger("posbench")
    root.handlers = [handler]
    root.setLevel(logging.WARNING if is_quiet() else logging.INFO)


@contextlib.contextmanager
def log_shown() -> Iterator[None]:
    """Show posbench's log within the block, unless the caller has set up logging;
    restore logging afterwards.
    """
    root = logging.getLogger("posbench")
    handlers, level = root.handlers, root.level
    if not root.hasHandlers():
        log_to_terminal()
    try:
        yield
    finally:
        root.handlers = handlers
        root.setLevel(level)


class Updates:
    """The progress of training as a bar or as lines of the log: the loss, the speed and
    the time left.
    """

    def __init__(
        self, total: int, start: int, full_speed: float | None, bar: Progress | None
    ) -> None:
        self._total = total
        self._start = start
        self._step = start
        self._full_speed = full_speed
        self._began = 0.0  # the time of the first update seen
        self._start_tokens = 0  # the tokens up to it
        self._next_line = 0.0
        self._bar = bar
        if bar:
            self._task = bar.add_task(
                "", total=total, completed=start, shown="starting"
            )

    def advance(self, loss: float, tokens: int) -> None:
        """Record an update: its loss in nats per token, and the number of all tokens so
        far.
        """
        self._step += 1
        now = time.monotonic()
        if self._step == self._start + 1:
            self._began = now
            self._start_tokens = tokens
        text = f"loss {loss:.3f}" + self._speed(now, tokens)
        if self._bar:
            self._bar.update(self._task, advance=1, shown=text)
        elif now >= self._next_line or self._step == self._total:
            self._next_line = now + LINE_EVERY_SECONDS
            text += self._time_left(now)
            logger.info("step %d/%d  %s", self._step, self._total, text)

    def _speed(self, now: float, tokens: int) -> str:
        if now == self._began:
            return ""
        speed = (tokens - self._start_tokens) / (now - self._began)
        text = f"  {speed:,.0f} tokens/s"
        if self._full_speed:
            text += f"  {speed / self._full_speed:.0%} MFU"
        return text

    def _time_left(self, now: float) -> str:
        n_done = self._step - self._start - 1
        n_left = self._total - self._step
        if n_done == 0 or n_left == 0:
            return ""
        seconds = (now - self._began) / n_done * n_left
        return f"  {timedelta(seconds=round(seconds))} left"


@contextlib.contextmanager
def progress(
    total: int, start: int, full_speed: float | None = None
) -> Iterator[Updates]:
    """Show progress over updates `start` .. `total`: a bar on a terminal, elsewhere a
    line now and then.

    `full_speed`: tokens per second at the devices' peak, if known. The speed is then
    also shown as a share of it (MFU).
    """
    if is_quiet() or not stderr.is_terminal:
        yield Updates(total, start, full_speed, None)
        return
    bar = Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[shown]}"),
        TimeRemainingColumn(),
        console=stderr,
        transient=True,
    )
    with bar:
        yield Updates(total, start, full_speed, bar)


class Work:
    """Other work of a known amount. `message`, its line in the log, takes what is done,
    the total and the time left.
    """

    def __init__(self, total: int, message: str) -> None:
        self.total = total
        self.message = message
        self.done = 0
        self.began = time.monotonic()
        self.last = self.began

    def add(self, count: int) -> None:
        """Record that `count` more is done, and log the progress every
        `LINE_EVERY_SECONDS`.
        """
        self.done += count
        now = time.monotonic()
        if now > self.last + LINE_EVERY_SECONDS and self.done < self.total:
            self.last = now
            seconds = (now - self.began) / self.done * (self.total - self.done)
            left = timedelta(seconds=round(seconds))
            logger.info(self.message, f"{self.done:,}", f"{self.total:,}", left)
