"""How a command ends: one line on stderr and an exit code, whatever went wrong.

0 success, 2 the user's mistake, 1 a failed run, 128 + n for signal n. A traceback is
shown only with --debug.
"""

import logging
import os
import sys
import traceback
from collections.abc import Callable
from errno import (
    EACCES,
    EEXIST,
    EISDIR,
    ENAMETOOLONG,
    ENOENT,
    ENOSPC,
    ENOTDIR,
    EPERM,
    EROFS,
)

from posbench.errors import PosbenchError

# environment variable; "1" is --debug, also for child processes
DEBUG = "POSBENCH_DEBUG"
QUIET = "POSBENCH_QUIET"  # the same for --quiet
_FILES = (EACCES, EPERM, EROFS, ENOENT, EISDIR, ENAMETOOLONG, ENOTDIR, EEXIST)


def run(command: Callable[[], object]) -> int:
    """Run a command and return its exit code; print the one line if it failed."""
    try:
        command()
        sys.stdout.flush()
        return 0
    except (SystemExit, BrokenPipeError) as error:
        if isinstance(error, BrokenPipeError) or isinstance(
            error.__context__, BrokenPipeError
        ):
            # a reader that stops, as `| head` does, ends only the output
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return 0
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        return report(PosbenchError(error.code))  # the words of a user's own code
    except BaseException as error:  # panics of Rust code are not an Exception
        return report(error)


def report(error: BaseException) -> int:
    """Print an error as one line and return its exit code. With --debug its traceback
    comes first.
    """
    if os.environ.get(DEBUG) == "1":
        traceback.print_exception(error)
    text = f"{type(error).__name__}: {error} (posbench --debug shows where)"
    code = 1
    if isinstance(error, KeyboardInterrupt):
        text = "interrupted"
        if sys.argv[1:2] and sys.argv[1] in ("train", "sweep", "evaluate", "reproduce"):
            text = "interrupted: finished work is kept; the same command continues"
        code = 130
    elif isinstance(error, PosbenchError):
        text = str(error)
        code = error.exit_code
    elif isinstance(error, OSError) and error.errno in _FILES and error.filename:
        advice = (
            "change its rights, or choose another folder (runtime.outputs,"
            " runtime.cache)"
        )
        path = os.fsdecode(error.filename)
        code = 2
        text = f"{path}: {error.strerror}: posbench needs to read or write it; {advice}"
    elif isinstance(error, OSError) and error.errno == ENOSPC:
        text = f"cannot write all of the output: {error.strerror}"
    print(
        f"error: {escape_controls(' '.join(text.split()))}", file=sys.stderr, flush=True
    )
    return code


def is_quiet() -> bool:
    """Return whether only warnings, errors and the places of results are printed."""
    return os.environ.get(QUIET) == "1"


def escape_controls(text: str) -> str:
    """Return text with its control characters, line breaks among them, as escapes:
    `\\n`, `\\x1b`.
    """
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii")
        for c in text
    )


class Escaped(logging.Formatter):
    """A formatter of one line per record: names and paths can neither forge a line nor
    control a terminal.
    """

    def format(self, record: logging.LogRecord) -> str:
        return escape_controls(super().format(record))


def tolerant_output() -> None:
    """Make a terminal without Unicode show question marks, not fail."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
