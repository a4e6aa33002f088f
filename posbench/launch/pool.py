"""Jobs as processes, several at a time: a kill of one does not touch the others.

What became of a job is what its `run.json` says. For a process that died before it could write, it is written here.
"""

import dataclasses
import functools
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posbench import files, machine
from posbench.errors import Stopped, UserError
from posbench.launch import jobs, template
from posbench.launch.jobs import FINAL, Job, Status
from posbench.launch.template import Process, Template
from posbench.run_folder.folder import Run
from posbench.run_folder.lock import in_use
from posbench.terminal import exits
from posbench.terminal.signals import stop_signals

POLL_SECONDS = 0.2
_RETRY_SECONDS = 2.0  # between looks at a run that another process owns
Show = Callable[[dict[str, Status]], None]  # called repeatedly with the status of every job, by id


@dataclasses.dataclass(frozen=True)
class _Started:
    job: Job
    slot: dict[str, str]
    before: dict[str, Any]  # run.json before it started
    oom_kills: int | None  # of the kernel, before it started
    process: Process


def run(todo: list[Job], slots: list[dict[str, str]], show: Show) -> dict[str, Status]:
    """Run jobs until none can be run any more.

    Args:
        slots: one entry per process at a time: environment variables for whoever runs in it.

    Returns:
        The status of each job by its id.

    Raises:
        Stopped: SIGINT or SIGTERM. The jobs were asked to save and have ended; the same sweep continues.
    """
    status = {job.id: Status("done") if jobs.is_finished(job) else jobs.WAITING for job in todo}
    running: list[_Started] = []
    looked: dict[str, float] = {}
    with template.opened() as opened, stop_signals() as stopped:
        begin = functools.partial(_fork, opened) if opened else start
        told = 0  # signals passed on
        while running or (not stopped and any(one.name not in FINAL for one in status.values())):
            free = [slot for slot in slots if all(slot is not one.slot for one in running)]
            for job, slot in zip([] if stopped else _startable(todo, status, looked), free, strict=False):
                running.append(_Started(job, slot, jobs.record(job), machine.oom_kills(), begin(job, slot)))
                status[job.id] = jobs.RUNNING
            for one in list(running):
                if (code := one.process.poll()) is not None:
                    running.remove(one)
                    status[one.job.id] = outcome(one.job, code, one.before, stopped, one.oom_kills)
            for number in stopped[told:]:
                told += 1
                for one in running:  # the first signal lets them save, the second does not
                    one.process.send_signal(number if told == 1 else signal.SIGKILL)
            show(status)
            time.sleep(POLL_SECONDS if running or not stopped else 0)
        show(status)
    if stopped:
        name = signal.Signals(stopped[0]).name
        raise Stopped(stopped[0], f"stopped by {name}; what was running has saved itself, the same sweep continues")
    return status


def _startable(todo: list[Job], status: dict[str, Status], looked: dict[str, float]) -> list[Job]:
    """Jobs that wait, and those that another process has given up. `looked` has the time of the last look at each."""
    found = []
    for job in todo:
        if status[job.id] == jobs.WAITING:
            found.append(job)
        elif status[job.id] == jobs.IN_USE and time.monotonic() >= looked.get(job.id, 0.0) + _RETRY_SECONDS:
            looked[job.id] = time.monotonic()
            if not in_use(job.folder):
                found.append(job)
    return found


def gpus(each: int = 1) -> list[dict[str, str]]:
    """Environments that confine jobs to their own GPUs, so many each: one for every job that fits."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]
    groups = [names[first : first + each] for first in range(0, len(names) - each + 1, each)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(group)} for group in groups] or [{}]


def start(job: Job, environment: dict[str, str], rank: int = 0) -> subprocess.Popen[bytes]:
    """Start a job's process. It ends when this process does.

    It is a group of its own, so that Ctrl-C reaches it once, from here, and lets it save.

    Args:
        rank: which of several processes it is that a scheduler has for the job; only the first has the run folder.
    """
    command = [sys.executable, "-P", "-m", "posbench.launch.job", *_arguments(job), "--parent", str(os.getpid())]
    with files.replaced(job.output.with_suffix(f".rank-{rank}.log") if rank else job.output) as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_environment(job), **environment},
            start_new_session=True,
        )


def _fork(template: Template, job: Job, environment: dict[str, str]) -> Process:
    """The same, without the imports."""
    arguments = _arguments(job)
    with files.replaced(job.output) as output:
        return template.start(arguments, _environment(job) | environment, output)


def _arguments(job: Job) -> list[str]:
    """Of `posbench.launch.job`, for a job that is saved with that."""
    jobs.save(job)
    given = [str(job.saved), "--run-dir", str(job.folder)]
    return [*given, "--command", shlex.join(["posbench", "train", *job.overrides])] if job.overrides else given


def _environment(job: Job) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(job.config.runtime.threads)} if job.config.runtime.threads else {}


def outcome(
    job: Job, code: int, before: dict[str, Any], stopped: list[int] | None = None, oom_kills: int | None = None
) -> Status:
    """The outcome of a job whose process ended; written into `run.json` if the process could not.

    Args:
        code: what the process returned, negative for a signal.
        before: `run.json` as it was before the process started.
        stopped: signals that made this process stop it.
        oom_kills: processes that the kernel had ended for lack of memory before this one started.
    """
    now = jobs.record(job)
    if code == exits.IN_USE:
        return jobs.IN_USE
    if now and now != before and now["status"] != "running":
        return jobs.status(job)
    if code == 0:
        return Status("done")
    status, reason, message = (
        ("stopped", "signal", "stopped before it could save") if stopped else _death(job, code, oom_kills)
    )
    return write_outcome(job, Status(status, reason, message))


def write_outcome(job: Job, status: Status) -> Status:
    """Write the outcome into `run.json` for a process that could not; wait if another process owns the run."""
    try:
        with Run.open(job.folder, job.config, command=None) as run:
            run.finish(status.name, status.reason, status.message)
    except UserError:
        return jobs.IN_USE if in_use(job.folder) else status
    return status


def _death(job: Job, code: int, oom_kills: int | None) -> tuple[str, str, str]:
    if code == -signal.SIGKILL:
        now = machine.oom_kills()
        if now is None or oom_kills is None:
            return "failed", "signal", "killed by SIGKILL: by a user, a scheduler, or the system where memory ran out"
        if now > oom_kills:
            return "failed", "oom", "killed by SIGKILL, while the system ended processes since memory had run out"
        return "failed", "signal", "killed by SIGKILL, not by the system for lack of memory"
    if code < 0:
        return "failed", "signal", f"killed by {signal.Signals(-code).name}"
    return "failed", "error", last_words(job.output) or f"ended with exit code {code}"


def last_words(output: Path) -> str:
    """The error line that a process printed, or else its last line."""
    lines = [line.strip() for line in output.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1]
