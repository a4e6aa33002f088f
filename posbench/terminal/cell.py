"""A notebook's cell instead of a terminal: one log line and one bar, each rewritten in place."""

import logging
import sys
import time
from typing import Any

from rich.text import Text

SHOW_EVERY_SECONDS = 0.2  # each update sends the whole output to the browser


def is_here() -> bool:
    """Whether this process is the kernel of a notebook; IPython in a terminal is a terminal."""
    ipython = sys.modules.get("IPython")  # a notebook has always imported it
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and hasattr(shell, "kernel")


class Output:
    """One output of the running cell, which can be replaced; works in every frontend, without widgets."""

    def __init__(self) -> None:
        self._handle: Any = None  # None until something is shown
        self._next = 0.0

    def show(self, shown: Any, at_once: bool = False) -> None:
        """Show anything that rich can draw in place of what was shown; unless `at_once`, not soon after an update.

        Skipped updates are lost: show the last one `at_once`.
        """
        if self._handle is None:
            from IPython.display import display

            self._handle = display(shown, display_id=True)
        elif at_once or time.monotonic() >= self._next:
            self._handle.update(shown)
            self._next = time.monotonic() + SHOW_EVERY_SECONDS


class LastLine(logging.Handler):
    """Shows only the newest log line. Warnings stay, each on its own line on stderr."""

    def __init__(self) -> None:
        super().__init__()
        self._output = Output()

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        if record.levelno >= logging.WARNING:
            print(line, file=sys.stderr)
        else:
            self._output.show(Text(line), at_once=True)
