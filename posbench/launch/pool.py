"""A process per run, so many at a time: a crash or a kill of one takes no other with it.

What became of a run is what its `run.json` says. For a process that died before it could write, it is written here.
"""

import contextlib
import functools
import logging
import multiprocessing.connection
import signal
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from typing import Any

from posbench.errors import InUse, Stopped, UserError
from posbench.launch import child, states
from posbench.launch.plans import Plan
from posbench.launch.states import Status
from posbench.run.run import Run
from posbench.terminal.signals import stop_signals

logger = logging.getLogger(__name__)
_LINE_EVERY_SECONDS = 30.0


def run(todo: list[Plan], slots: list[dict[str, str]]) -> dict[str, Status]:
    """Run plans until none can be run any more; returns the status of each run by its id.

    Args:
        slots: one entry per process at a time: environment variables for whoever runs in it.

    Raises:
        Stopped: SIGINT or SIGTERM. The runs were asked to save and have ended; the same sweep continues.
    """
    status = {plan.id: states.DONE if states.is_finished(plan) else states.WAITING for plan in todo}
    waiting, free = [plan for plan in todo if status[plan.id] == states.WAITING], list(slots)
    running: dict[int, tuple[BaseProcess, Plan, dict[str, str], dict[str, Any]]] = {}  # by the process's sentinel
    passed_on, next_line = 0, time.monotonic() + _LINE_EVERY_SECONDS
    with stop_signals() as received:
        while running or (waiting and not received):
            while waiting and free and not received:
                plan, slot = waiting.pop(0), free.pop(0)
                before = states.record(plan)
                process = _start(plan, slot)
                running[process.sentinel] = process, plan, slot, before
                status[plan.id] = states.RUNNING
                logger.info("%s", states.line(plan, states.RUNNING, todo))
            for ended in multiprocessing.connection.wait(list(running), timeout=0.5):  # which looks for signals
                process, plan, slot, before = running.pop(ended)  # type: ignore[arg-type]
                process.join()
                free.append(slot)
                status[plan.id] = outcome(plan, process.exitcode or 0, before, received)
                logger.info("%s", states.line(plan, status[plan.id], todo))
            for number in received[passed_on:]:
                passed_on += 1  # the first signal lets them save, the second does not
                child.send((process for process, *_ in running.values()), number if passed_on == 1 else signal.SIGKILL)
            if time.monotonic() > next_line:
                next_line += _LINE_EVERY_SECONDS
                states.log_progress(todo, status)
    if received:
        name = signal.Signals(received[0]).name
        raise Stopped(received[0], f"stopped by {name}; what was running has saved itself, the same sweep continues")
    return status


def _start(plan: Plan, environment: dict[str, str]) -> BaseProcess:
    from posbench.launch.run import run

    plan.output.parent.mkdir(parents=True, exist_ok=True)
    return child.start(child.FORKED, functools.partial(run, plan), environment, plan.output)


def outcome(plan: Plan, code: int, before: dict[str, Any], received: Sequence[int] = ()) -> Status:
    """The outcome of a run whose process ended; written into `run.json` if the process could not.

    Args:
        code: what the process returned, negative for a signal.
        before: `run.json` as it was before the process started.
        received: signals that made this process stop it.
    """
    if code == InUse.exit_code:
        return states.IN_USE
    if states.record(plan) not in ({}, before) and (recorded := states.status(plan)).name != "running":
        return recorded
    if code == 0:
        return states.DONE
    if received:
        status = Status("stopped", "signal", "stopped before it could save")
    elif code < 0:
        memory = ", perhaps since memory ran out" if code == -signal.SIGKILL else ""
        status = Status("failed", "signal", f"killed by {signal.Signals(-code).name}{memory}")
    else:
        status = Status("failed", "error", child.last_words(plan.output) or f"ended with exit code {code}")
    with contextlib.suppress(UserError, OSError), Run.open(plan.folder, plan.config, command=None) as run:
        run.finish(*status)
    return status
