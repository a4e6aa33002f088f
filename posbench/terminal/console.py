"""The terminal: posbench's console, the log on stderr, and the progress of work."""

import contextlib
import functools
import logging
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.highlighter import NullHighlighter
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.table import Table

from posbench.terminal.exits import Escaped, escape_controls

logger = logging.getLogger(__name__)

LINE_EVERY_SECONDS = 10.0


class _Console(Console):
    """A console without markup and emoji codes: output is data. Control characters are
    escaped; line breaks stay.
    """

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            printable = segment.control or segment.text.isprintable()
            lines = [] if printable else map(escape_controls, segment.text.split("\n"))
            yield segment if printable else segment._replace(text="\n".join(lines))


# Makes a console on stdout. The width, colours and encoding are those at the time of
# the call.
stdout = functools.partial(_Console, markup=False, emoji=False, highlight=False)
stderr: Console = stdout(stderr=True)


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
    spare, columns = list(spare), list(range(len(widths)))
    while (
        spare
        and sum(widths[column] for column in columns) + 2 * (len(columns) - 1) > room
    ):
        columns.remove(spare.pop(0))
    return columns


def log_to_terminal() -> None:
    """Send posbench's log to stderr: through rich on a terminal, so that a live bar
    stays whole.
    """
    rich = RichHandler(
        console=stderr, show_path=False, show_level=False, highlighter=NullHighlighter()
    )
    handler, prefix = (
        (rich, "")
        if stderr.is_terminal
        else (logging.StreamHandler(sys.stderr), "%(asctime)s ")
    )
    handler.setFormatter(Escaped(f"{prefix}%(message)s", datefmt="%H:%M:%S"))
    root = logging.getLogger("posbench")
    root.handlers = [handler]
    root.setLevel(logging.INFO)


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
        self._bar = bar
        # time and tokens of the first update seen
        self._first: tuple[float, int] | None = None
        self._next_line = 0.0
        self._task = (
            bar.add_task("", total=total, completed=start, shown="starting")
            if bar
            else TaskID(0)
        )

    def advance(self, loss: float, tokens: int) -> None:
        """Record an update: its loss in nats per token, and the number of all tokens so
        far.
        """
        self._step += 1
        now = time.monotonic()
        began, start_tokens = self._first = self._first or (now, tokens)
        speed = (tokens - start_tokens) / (now - began) if now > began else 0.0
        share = f"  {speed / self._full_speed:.0%} MFU" if self._full_speed else ""
        text = f"loss {loss:.3f}" + (f"  {speed:,.0f} tokens/s{share}" if speed else "")
        if self._bar:
            self._bar.update(self._task, advance=1, shown=text)
        elif now >= self._next_line or self._step == self._total:
            self._next_line = now + LINE_EVERY_SECONDS
            n_done, n_left = self._step - self._start - 1, self._total - self._step
            eta = (
                f"  {timedelta(seconds=round((now - began) / n_done * n_left))} left"
                if n_done and n_left
                else ""
            )
            logger.info("step %d/%d  %s%s", self._step, self._total, text, eta)


@contextlib.contextmanager
def progress(
    total: int, start: int, full_speed: float | None = None
) -> Iterator[Updates]:
    """Show progress over updates `start` .. `total`: a bar on a terminal, elsewhere a
    line now and then.

    `full_speed`: tokens per second at the devices' peak, if known. The speed is then
    also shown as a share of it (MFU).
    """
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[shown]}"),
    )
    bar = (
        Progress(*columns, TimeRemainingColumn(), console=stderr, transient=True)
        if stderr.is_terminal
        else None
    )
    with bar or contextlib.nullcontext():
        yield Updates(total, start, full_speed, bar)


class Work:
    """Other work of a known amount. `message`, its line in the log, takes what is done,
    the total and the time left.
    """

    def __init__(self, total: int, message: str) -> None:
        self.total, self.message, self.done = total, message, 0
        self.began = self.last = time.monotonic()

    def add(self, count: int) -> None:
        """Record that `count` more is done, and log the progress every
        `LINE_EVERY_SECONDS`.
        """
        self.done += count
        if (
            now := time.monotonic()
        ) > self.last + LINE_EVERY_SECONDS and self.done < self.total:
            self.last = now
            eta = timedelta(
                seconds=round((now - self.began) / self.done * (self.total - self.done))
            )
            logger.info(self.message, f"{self.done:,}", f"{self.total:,}", eta)
