"""How a command ends: one line on stderr and an exit code, whatever went wrong.

0 success, 2 the user's mistake, 1 a failed run, 75 a run in use, 128 + n for signal n.
A traceback is shown only with --debug.
"""

import errno
import io
import logging
import os
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from posbench.errors import PosbenchError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

DEBUG = "POSBENCH_DEBUG"  # environment variable; "1" is --debug, also for child processes
_OTHER_PLACE = "change its rights, or choose another folder (runtime.outputs, runtime.cache)"
_NO_ACCESS = {  # system errors about the user's files, and what to do
    errno.EACCES: _OTHER_PLACE,
    errno.EPERM: _OTHER_PLACE,
    errno.EROFS: "choose another folder (runtime.outputs, runtime.cache)",
    errno.ENOENT: "it does not exist, or cannot be created: choose another folder (runtime.outputs, runtime.cache)",
    errno.ENAMETOOLONG: "choose a folder with a shorter name (runtime.outputs, runtime.cache)",
    errno.ENOTDIR: "a file stands where a folder is expected, move it away",
    errno.EEXIST: "a file stands where a folder is expected, move it away",
}


def run(command: Callable[[], object]) -> int:
    """Run a command and return its exit code; print the one line if it failed."""
    try:
        command()
        sys.stdout.flush()
        return 0
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except GeneratorExit:
        raise
    except BaseException as error:  # panics of Rust code are not an Exception
        return report(error)


def report(error: BaseException) -> int:
    """Print an error as one line, with --debug after its traceback; return its exit code."""
    if os.environ.get(DEBUG) == "1":
        traceback.print_exception(error)
    text, code = described(error)
    print(f"error: {spelt_out(' '.join(text.split()))}", file=sys.stderr, flush=True)
    return code


def described(error: BaseException) -> tuple[str, int]:
    """Return what an error says to a user, and its exit code."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 130
    if isinstance(error, PosbenchError):
        return str(error), error.exit_code
    if isinstance(error, OSError) and error.errno in _NO_ACCESS and error.filename:
        where = os.fsdecode(error.filename)
        return f"{where}: {error.strerror}: posbench needs to read or write it; {_NO_ACCESS[error.errno]}", 2
    return f"{type(error).__name__}: {error} (posbench --debug shows where)", 1


def counted(count: int, noun: str) -> str:
    """`1 run`, `3 runs`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def spelt_out(text: str) -> str:
    """Text with its control characters, line breaks among them, as escapes: `\\n`, `\\x1b`."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


class SpeltOut(logging.Formatter):
    """One line per record: names and paths can neither forge a line nor control a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return spelt_out(super().format(record))


def tolerant_output() -> None:
    """Keep working whatever happens to stdout and stderr.

    A reader that stops (`| head`) ends only the output. A terminal without Unicode shows `\\u2026`.
    """
    sys.stdout = _tolerant(sys.stdout, sys.__stdout__, 1)
    sys.stderr = _tolerant(sys.stderr, sys.__stderr__, 2)


def _tolerant(stream: TextIO, original: "TextIO | None", number: int) -> TextIO:
    if stream is original and isinstance(stream, io.TextIOWrapper):
        stream.flush()
        return io.TextIOWrapper(
            io.BufferedWriter(_Pipe(stream.fileno(), "w", closefd=False)),
            encoding=stream.encoding,
            errors="backslashreplace",
            line_buffering=stream.line_buffering or number == 2,
            write_through=stream.write_through,
        )
    return stream  # a replaced stream: its owner is responsible


class _Pipe(io.FileIO):
    """A stream whose reader may leave: later output is dropped."""

    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return super().write(data)
