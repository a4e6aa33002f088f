"""Jobs as processes, several at a time: a kill of one does not touch the others.

What became of a job is what its `run.json` says. For a process that died before it could write, it is written here.
"""

import atexit
import contextlib
import dataclasses
import multiprocessing
import multiprocessing.process
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from posbench.errors import InUse, Stopped, UserError
from posbench.launch import states
from posbench.launch.plans import Plan
from posbench.launch.states import FINAL, Status
from posbench.run_folder.folder import Run
from posbench.terminal import exits
from posbench.terminal.signals import end_after, stop_signals

POLL_SECONDS = 0.2
# Forks have what a server has imported (`preload`). Only on Linux do loaded libraries survive a fork.
_PROCESSES = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
_PROCESSES.set_forkserver_preload(["__main__", "posbench.launch.preload"])
Show = Callable[[dict[str, Status]], None]  # called repeatedly with the status of every job, by id


@dataclasses.dataclass(frozen=True)
class _Started:
    job: Plan
    slot: dict[str, str]
    before: dict[str, Any]  # run.json before it started
    process: multiprocessing.process.BaseProcess


def run(todo: list[Plan], slots: list[dict[str, str]], show: Show) -> dict[str, Status]:
    """Run jobs until none can be run any more.

    Args:
        slots: one entry per process at a time: environment variables for whoever runs in it.

    Returns:
        The status of each job by its id.

    Raises:
        Stopped: SIGINT or SIGTERM. The jobs were asked to save and have ended; the same sweep continues.
    """
    status = {job.id: states.before(job) for job in todo}
    running: list[_Started] = []
    with stop_signals() as stopped:
        told = 0  # signals passed on
        while True:
            free = [slot for slot in slots if all(slot is not one.slot for one in running)]
            if not running and (stopped or all(one.name in FINAL for one in status.values())):
                break
            waiting = [] if stopped else [job for job in todo if status[job.id] == states.WAITING]
            for job, slot in zip(waiting, free, strict=False):
                running.append(_Started(job, slot, states.record(job), _start(job, slot)))
                status[job.id] = states.RUNNING
            for one in list(running):
                if (code := one.process.exitcode) is not None:
                    running.remove(one)
                    status[one.job.id] = outcome(one.job, code, one.before, stopped)
            for number in stopped[told:]:
                told += 1
                for one in running:  # the first signal lets them save, the second does not
                    _send(one.process, number if told == 1 else signal.SIGKILL)
            show(status)
            time.sleep(POLL_SECONDS if running or not stopped else 0)
        show(status)
    if stopped:
        name = signal.Signals(stopped[0]).name
        raise Stopped(stopped[0], f"stopped by {name}; what was running has saved itself, the same sweep continues")
    return status


def gpus(each: int = 1) -> list[dict[str, str]]:
    """Environments that confine jobs to `each` GPUs of their own: one for every job that fits."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]
    groups = [names[first : first + each] for first in range(0, len(names) - each + 1, each)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(group)} for group in groups] or [{}]


def _start(plan: Plan, environment: dict[str, str]) -> multiprocessing.process.BaseProcess:
    """Start the process of a plan. It ends when this process does."""
    plan.output.parent.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONSAFEPATH"] = "1"  # or Python would import from the current folder, which may be a stranger's
    process = _PROCESSES.Process(target=_job, args=(plan, os.environ | environment))  # type: ignore[attr-defined]
    process.start()
    return process  # type: ignore[no-any-return]


def _send(process: multiprocessing.process.BaseProcess, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        if process.pid and process.exitcode is None:
            os.kill(process.pid, number)


def _job(plan: Plan, environment: dict[str, str]) -> NoReturn:
    """Be the process of a plan: a session of its own, so that Ctrl-C reaches it once, through the sweep."""
    os.setsid()
    os.environ.clear()  # the fork server may be older than a variable
    parent = multiprocessing.parent_process()
    assert parent
    end_after(parent.join)
    try:
        code = _run_job(plan, environment)
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out
    sys.exit(code)


def _run_job(plan: Plan, environment: Mapping[str, str]) -> int:
    """Run a plan in this process, which prints into the plan's file. Returns the exit code."""
    from posbench.launch import job

    with plan.output.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.update(environment)
    if threads := plan.config.runtime.threads:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    exits.tolerant_output()

    def run() -> None:
        try:
            job.run(plan)
        except InUse as error:
            exits.report(error)
            raise SystemExit(exits.IN_USE) from None

    return exits.run(run)


def outcome(job: Plan, code: int, before: dict[str, Any], stopped: list[int] | None = None) -> Status:
    """The outcome of a job whose process ended; written into `run.json` if the process could not.

    Args:
        code: what the process returned, negative for a signal.
        before: `run.json` as it was before the process started.
        stopped: signals that made this process stop it.
    """
    now = states.record(job)
    if code == exits.IN_USE:
        return states.IN_USE
    if now and now != before and (found := states.status(job)).name != "running":
        return found
    if code == 0:
        return Status("done")
    status = Status("stopped", "signal", "stopped before it could save") if stopped else _death(job, code)
    try:  # a folder that cannot be written, or that another process owns, keeps its record
        with Run.open(job.folder, job.config, command=None) as run:
            run.finish(status.name, status.reason, status.message)
    except (UserError, OSError):
        pass
    return status


def _death(job: Plan, code: int) -> Status:
    if code == -signal.SIGKILL:
        return Status("failed", "signal", "killed by SIGKILL, perhaps since memory ran out")
    if code < 0:
        return Status("failed", "signal", f"killed by {signal.Signals(-code).name}")
    return Status("failed", "error", _last_words(job.output) or f"ended with exit code {code}")


def _last_words(output: Path) -> str:
    """The error line that a process printed, or else its last line."""
    text = output.read_text(encoding="utf-8", errors="replace") if output.is_file() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1]
