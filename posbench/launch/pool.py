"""A process per run, so many at a time: a crash or a kill of one takes no other with it.

What became of a run is what its `run.json` says. For a process that died before it could write, it is written here.
"""

import atexit
import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from posbench.errors import InUse, Stopped, UserError
from posbench.launch import states
from posbench.launch.plans import Plan
from posbench.launch.states import Status
from posbench.run.run import Run
from posbench.terminal import exits
from posbench.terminal.signals import exit_when_parent_exits, stop_signals

POLL_SECONDS = 0.5  # to look for signals and to show progress; the end of a process is seen at once
# Forks have what a server has imported (`preload`). Only on Linux do loaded libraries survive a fork.
_PROCESSES = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
_PROCESSES.set_forkserver_preload(["__main__", "posbench.launch.preload"])
Show = Callable[[dict[str, Status]], None]  # called repeatedly with the status of every run, by id
Process = multiprocessing.process.BaseProcess


def run(todo: list[Plan], slots: list[dict[str, str]], show: Show) -> dict[str, Status]:
    """Run plans until none can be run any more.

    Args:
        slots: one entry per process at a time: environment variables for whoever runs in it.

    Returns:
        The status of each run by its id.

    Raises:
        Stopped: SIGINT or SIGTERM. The runs were asked to save and have ended; the same sweep continues.
    """
    waiting, free = [plan for plan in todo if not states.is_finished(plan)], list(slots)
    status = {plan.id: states.WAITING if plan in waiting else Status("done") for plan in todo}
    running: dict[int, tuple[Process, Plan, dict[str, str], dict[str, Any]]] = {}  # by the process's sentinel
    with stop_signals() as received:
        passed_on = 0
        while running or (waiting and not received):
            while waiting and free and not received:
                plan, slot = waiting.pop(0), free.pop(0)
                before = states.record(plan)
                process = _start(plan, slot)
                running[process.sentinel] = process, plan, slot, before
                status[plan.id] = states.RUNNING
            for ended in multiprocessing.connection.wait(list(running), timeout=POLL_SECONDS):
                process, plan, slot, before = running.pop(ended)  # type: ignore[arg-type]
                process.join()
                free.append(slot)
                status[plan.id] = outcome(plan, process.exitcode or 0, before, received)
            for number in received[passed_on:]:
                passed_on += 1
                for process, *_ in running.values():  # the first signal lets them save, the second does not
                    with contextlib.suppress(ProcessLookupError):  # it has just ended
                        os.kill(process.pid or 0, number if passed_on == 1 else signal.SIGKILL)
            show(status)
    if received:
        name = signal.Signals(received[0]).name
        raise Stopped(received[0], f"stopped by {name}; what was running has saved itself, the same sweep continues")
    return status


def gpus(each: int = 1) -> list[dict[str, str]]:
    """Environments that confine runs to `each` GPUs of their own: one for every run that fits."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]
    groups = [names[first : first + each] for first in range(0, len(names) - each + 1, each)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(group)} for group in groups] or [{}]


def _start(plan: Plan, environment: dict[str, str]) -> Process:
    """Start the process of a plan. It ends when this process does."""
    plan.output.parent.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONSAFEPATH"] = "1"  # or Python would import from the current folder, which may be a stranger's
    process: Process = _PROCESSES.Process(target=_job, args=(plan, os.environ | environment))  # type: ignore[attr-defined]
    process.start()
    return process


def _job(plan: Plan, environment: dict[str, str]) -> NoReturn:
    """Run a plan in this process: a session of its own, so that Ctrl-C reaches it once, through the sweep."""
    from posbench.launch import run

    os.setsid()
    os.environ.clear()  # the fork server may be older than a variable
    os.environ.update(environment)
    parent = multiprocessing.parent_process()
    assert parent
    exit_when_parent_exits(parent.join)
    with plan.output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if threads := plan.config.runtime.threads:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    exits.tolerant_output()
    code = exits.run(lambda: run.run(plan))
    atexit._run_exitfuncs()  # multiprocessing leaves them out
    sys.exit(code)


def outcome(plan: Plan, code: int, before: dict[str, Any], received: list[int] | None = None) -> Status:
    """The outcome of a run whose process ended; written into `run.json` if the process could not.

    Args:
        code: what the process returned, negative for a signal.
        before: `run.json` as it was before the process started.
        received: signals that made this process stop it.
    """
    if code == InUse.exit_code:
        return states.IN_USE
    record = states.record(plan)
    if record and record != before and (recorded := states.status(plan)).name != "running":
        return recorded
    if code == 0:
        return Status("done")
    if received:
        status = Status("stopped", "signal", "stopped before it could save")
    elif code < 0:
        memory = ", perhaps since memory ran out" if code == -signal.SIGKILL else ""
        status = Status("failed", "signal", f"killed by {signal.Signals(-code).name}{memory}")
    else:
        status = Status("failed", "error", states.last_words(plan.output) or f"ended with exit code {code}")
    # A folder that cannot be written, or that another process owns, keeps its record.
    with contextlib.suppress(UserError, OSError), Run.open(plan.folder, plan.config, command=None) as run:
        run.finish(status.name, status.reason, status.message)
    return status
