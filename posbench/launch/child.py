"""Processes that posbench starts: each a session of its own, which saves itself and ends if its parent does."""

import atexit
import contextlib
import multiprocessing
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

from posbench import machine
from posbench.terminal import exits
from posbench.terminal.signals import exit_when_parent_exits

SPAWNED = multiprocessing.get_context("spawn")
# Forks have what a server has imported (`preload`). Only on Linux do loaded libraries survive a fork.
FORKED: BaseContext = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
FORKED.set_forkserver_preload(["posbench.launch.preload"])


def start(
    context: BaseContext, work: Callable[[], object], environment: Mapping[str, str], output: Path | None
) -> BaseProcess:
    """Start a process that does work, which can be pickled, and ends with its exit code.

    Args:
        environment: variables beside those of this process, OMP_NUM_THREADS among them.
        output: the file for what it prints; None: it prints where this process does.
    """
    os.environ["PYTHONSAFEPATH"] = "1"  # or Python would import from the current folder, which may be a stranger's
    process: BaseProcess = context.Process(target=_run, args=(work, os.environ | environment, output))  # type: ignore[attr-defined]
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType(
        "__main__"
    )  # it would import the caller's script, which calls this again
    try:
        process.start()
    finally:
        sys.modules["__main__"] = main
    return process


def send(processes: Iterable[BaseProcess], number: int) -> None:
    """Send those of the processes that have not ended a signal."""
    for process in processes:
        if process.exitcode is None and process.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)


def last_words(output: Path) -> str:
    """The error line that a process printed, or else its last line."""
    text = output.read_text(encoding="utf-8", errors="replace") if output.is_file() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1]


def _run(work: Callable[[], object], environment: Mapping[str, str], output: Path | None) -> NoReturn:
    os.setsid()  # Ctrl-C reaches it once, through its parent
    os.environ.clear()  # the fork server may be older than a variable
    os.environ.update(environment)
    parent = multiprocessing.parent_process()
    assert parent
    exit_when_parent_exits(parent.join)
    if output:
        with output.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    exits.tolerant_output()
    machine.set_threads(int(environment["OMP_NUM_THREADS"]))
    code = exits.run(work)
    atexit._run_exitfuncs()  # multiprocessing leaves them out
    sys.exit(code)
