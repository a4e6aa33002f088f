"""The terminal: posbench's console, its character set, and the live display of a run on stderr."""

import contextlib
import datetime
import logging
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.highlighter import NullHighlighter
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.text import Text

from posbench.terminal import exits

logger = logging.getLogger(__name__)

LINE_EVERY_SECONDS = 10.0

# All non-ASCII signs in pictures, tables and their texts.
SIGNS = "░▒▓█│─·●○◇±†‡≥²"


class _Console(Console):
    """All output is data: control characters are escaped in every text, here alone. Line breaks stay."""

    def render_str(self, text: str, **how: Any) -> Text:
        return super().render_str(_spelt(text), **how)  # first, so that columns have the width of the escaped text

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=_spelt(segment.text))


def _spelt(text: str) -> str:
    return text if text.isprintable() else "\n".join(map(exits.spelt_out, text.split("\n")))


def _open(on_stderr: bool) -> Console:
    # Names, paths and texts are data: never markup, emoji codes or anything else to interpret.
    return _Console(stderr=on_stderr, markup=False, emoji=False, highlight=False)


stderr = _open(on_stderr=True)


def stdout() -> Console:
    """A console on stdout, with its present width, colours and encoding."""
    return _open(on_stderr=False)


def carries_unicode(console: Console) -> bool:
    """Whether the terminal behind a console can show posbench's signs; otherwise ASCII is used."""
    try:
        SIGNS.encode(console.encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def log_to_terminal() -> None:
    """Send posbench's log to stderr: through rich on a terminal, so that the live bar stays whole."""
    root = logging.getLogger("posbench")
    root.handlers = [_handler()]
    root.setLevel(logging.INFO)


@contextlib.contextmanager
def log_shown() -> Iterator[None]:
    """Within it, show posbench's log; restores logging afterwards.

    If the caller has set up logging, records go only there.
    """
    root = logging.getLogger("posbench")
    handlers, level = root.handlers, root.level
    if not root.hasHandlers():
        log_to_terminal()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "IProgress not found")  # tqdm's, about a bar that is never shown
            yield
    finally:
        root.handlers = handlers
        root.setLevel(level)


def _handler() -> logging.Handler:
    handler: logging.Handler
    form = exits.SpeltOut("%(message)s")
    if stderr.is_terminal:
        plain = NullHighlighter()  # None would colour numbers and paths
        handler = RichHandler(console=stderr, show_path=False, show_level=False, markup=False, highlighter=plain)
    else:
        handler = logging.StreamHandler(sys.stderr)
        form = exits.SpeltOut("%(asctime)s %(message)s", datefmt="%H:%M:%S")
    handler.setFormatter(form)
    return handler


@contextlib.contextmanager
def progress(total: int, start: int, full_speed: float | None = None) -> "Iterator[_Bar | _Lines]":
    """Progress over updates `start` .. `total`: `advance` reports one, its loss in nats per token, and all tokens.

    Args:
        full_speed: tokens per second at the peak of the devices, if that is known: the share of it is shown (MFU).
    """
    bar = Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[said]}"),
        TimeRemainingColumn(),
        console=stderr,
        transient=True,
    )
    if stderr.is_terminal:
        with bar:
            yield _Bar(bar, total, start, full_speed)
    else:
        yield _Lines(total, start, full_speed)


class _Bar:
    def __init__(self, bar: Progress, total: int, start: int, full_speed: float | None) -> None:
        self.bar = bar
        self.task = bar.add_task("", total=total, completed=start, said="starting")
        self.speed, self.full_speed = _Speed(), full_speed

    def advance(self, loss: float, tokens: int) -> None:
        self.bar.update(self.task, advance=1, said=_said(loss, self.speed.at(tokens), self.full_speed))


class _Lines:
    def __init__(self, total: int, start: int, full_speed: float | None) -> None:
        self.total, self.first, self.step = total, start, start
        self.began = self.next_line = time.monotonic()
        self.speed, self.full_speed = _Speed(), full_speed

    def advance(self, loss: float, tokens: int) -> None:
        self.step += 1
        speed, now = self.speed.at(tokens), time.monotonic()
        if now < self.next_line and self.step < self.total:
            return
        self.next_line = now + LINE_EVERY_SECONDS
        line = f"step {self.step}/{self.total}  {_said(loss, speed, self.full_speed)}"
        if self.first + 1 < self.step < self.total:
            line += f"  {_left(now - self.began, self.step - self.first, self.total - self.step)} left"
        logger.info("%s", line)


class Work:
    """Other work of a known amount: says in the log every `LINE_EVERY_SECONDS` how far it is.

    Args:
        total: the amount, in any unit.
        told: a line with a place for what is done, for the total and for the time left.
    """

    def __init__(self, total: int, told: str) -> None:
        self.total, self.told = total, told
        self.done = 0
        self.began = self.last = time.monotonic()

    def add(self, count: int) -> None:
        """So much more is done."""
        self.done += count
        now = time.monotonic()
        if now > self.last + LINE_EVERY_SECONDS and self.done < self.total:
            self.last = now
            left = _left(now - self.began, self.done, self.total - self.done)
            logger.info(self.told, f"{self.done:,}", f"{self.total:,}", left)


def _left(seconds: float, done: int, rest: int) -> datetime.timedelta:
    return datetime.timedelta(seconds=round(seconds / done * rest))


def _said(loss: float, speed: float, full_speed: float | None) -> str:
    """The loss, and from the second update on the tokens per second, and which share of the peak that is."""
    share = f"  {speed / full_speed:.0%} MFU" if full_speed else ""
    return f"loss {loss:.3f}" + (f"  {speed:,.0f} tokens/s{share}" if speed else "")


class _Speed:
    """Tokens per second since the first update seen."""

    def __init__(self) -> None:
        self.first: tuple[float, int] | None = None

    def at(self, tokens: int) -> float:
        now = time.monotonic()
        if self.first is None:
            self.first = (now, tokens)
        began, before = self.first
        return (tokens - before) / (now - began) if now > began else 0.0
