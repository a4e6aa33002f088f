"""How a command ends: one line on stderr and an exit code, whatever went wrong.

0 success, 2 the user's mistake, 1 a failed run, 128 + n for signal n. A traceback is shown only with --debug.
"""

import logging
import os
import sys
import traceback
from collections.abc import Callable

from posbench.errors import PosbenchError

IN_USE = 75  # of a sweep's job whose run another process owns: to be tried again (EX_TEMPFAIL)
DEBUG = "POSBENCH_DEBUG"  # environment variable; "1" as --debug, for the processes that a command starts


def run(command: Callable[[], object], debug: bool = False) -> int:
    """Run a command and return its exit code, having printed the one line if it failed."""
    try:
        command()
        sys.stdout.flush()
        return 0
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except KeyboardInterrupt as error:
        return report(error, debug)
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except GeneratorExit:
        raise
    except BaseException as error:  # panics of Rust code are no Exception
        return report(error, debug)


def report(error: BaseException, debug: bool = False) -> int:
    """Print an error as its one line, with `debug` after its traceback; return the exit code that belongs to it."""
    if debug or os.environ.get(DEBUG) == "1":
        traceback.print_exception(error)
    if isinstance(error, KeyboardInterrupt):
        text, code = "interrupted", 130
    elif isinstance(error, PosbenchError):
        text, code = str(error), error.exit_code
    else:
        text, code = f"{type(error).__name__}: {error} (posbench --debug shows where)", 1
    print(f"error: {one_line(text)}", file=sys.stderr, flush=True)
    return code


def one_line(text: str) -> str:
    """Text as one line that a terminal cannot mistake for commands: control characters are spelt out."""
    return spelt_out(" ".join(text.split()))


def spelt_out(text: str) -> str:
    """Text with its control characters, line breaks among them, as escapes: `\\n`, `\\x1b`."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


class SpeltOut(logging.Formatter):
    """One line per record: what a name or a path holds can neither forge a line nor act on a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return spelt_out(super().format(record))


def tolerate_ascii() -> None:
    """Let a terminal without Unicode show `\\u2026` instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
