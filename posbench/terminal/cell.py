"""A notebook's cell instead of a terminal: one log line and one bar, each rewritten in place."""

import logging
import sys
import time
from typing import Any

from rich.progress import Progress
from rich.text import Text

SHOW_EVERY_SECONDS = 0.2  # each update sends the whole output to the browser


def is_here() -> bool:
    """Whether this process is the kernel of a notebook; IPython in a terminal is a terminal."""
    ipython = sys.modules.get("IPython")  # a notebook has always imported it
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and hasattr(shell, "kernel")


class Output:
    """One output of the running cell, which can be replaced; works in every frontend, without widgets."""

    def __init__(self, shown: Any) -> None:
        from IPython.display import display

        self._handle = display(shown, display_id=True)
        self._next = time.monotonic()

    def show(self, shown: Any, at_once: bool = False) -> None:
        """Replace the output by anything that rich can draw; unless `at_once`, only if the last update is not recent.

        Skipped updates are lost: show the last one `at_once`.
        """
        if at_once or time.monotonic() >= self._next:
            self._handle.update(shown)
            self._next = time.monotonic() + SHOW_EVERY_SECONDS


class LastLine(logging.Handler):
    """Shows only the newest log line. Warnings stay, each on its own line on stderr."""

    def __init__(self) -> None:
        super().__init__()
        self._output: Output | None = None

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        if record.levelno >= logging.WARNING:
            print(line, file=sys.stderr)
        elif self._output is None:
            self._output = Output(Text(line))
        else:
            self._output.show(Text(line), at_once=True)


class Bar:
    """A progress bar of rich, shown without rich's own display, which needs widgets."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._output: Output | None = None  # None if nothing is left to do

    def refresh(self, at_once: bool = False) -> None:
        table = self._bar.make_tasks_table(self._bar.tasks)
        if self._output is None:
            self._output = Output(table)
        else:
            self._output.show(table, at_once)
