"""A sweep's jobs as one array of submitit's, on Slurm or on this machine.

A run folder says how its job ended. Slurm is asked as well: a job that it ended may not have written anything.
"""

import contextlib
import importlib.util
import os
import signal
import socket
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from posbench import files
from posbench.config import compose
from posbench.errors import Stopped, UserError
from posbench.launch import pool, states
from posbench.launch.plans import Plan
from posbench.launch.slurm import Queue
from posbench.launch.states import FINAL, Status
from posbench.run_folder.lock import in_use
from posbench.terminal.signals import end_after, stop_signals, wait_for_parent

Launcher = tuple[str, DictConfig]  # submitit's name of the cluster, and its settings
_LAUNCHERS = {"submitit_slurm": "slurm", "submitit_local": "local"}  # and submitit's name of it
_POLL_SECONDS = 1.0
_FOLDER = "submitit_folder"
# Settings that every executor of submitit has. The names of others begin with the executor's.
_COMMON = {"cpus_per_task", "gpus_per_node", "mem_gb", "name", "nodes", "stderr_to_stdout", "tasks_per_node"}
_COMMON |= {"timeout_min"}


def check(overrides: list[str]) -> Launcher:
    """The cluster that `hydra/launcher=...` names, and its settings with `hydra.launcher.*` applied.

    Raises:
        UserError: another launcher, an unknown setting, or submitit is not installed.
    """
    name = next(o.partition("=")[2] for o in overrides if o.startswith("hydra/launcher="))
    if name not in _LAUNCHERS:
        raise UserError(
            f"hydra/launcher={name}: a sweep takes submitit_slurm or submitit_local; "
            "without a launcher it runs on this machine, --n-jobs at a time"
        )
    if not importlib.util.find_spec("submitit"):
        raise UserError(f"hydra/launcher={name} is not installed: pip install hydra-submitit-launcher")
    if any(override.startswith(f"hydra.launcher.{_FOLDER}=") for override in overrides):
        raise UserError(f"hydra.launcher.{_FOLDER} is the sweep's own: a new folder each time, beside its runs")
    return _LAUNCHERS[name], compose.launcher_config(overrides)


def refuse_lone_tasks(settings: DictConfig, processes: int) -> None:
    """Refuse several tasks of a scheduler that are not the processes of one run."""
    tasks = int(settings.nodes or 1) * int(settings.tasks_per_node or 1)
    if tasks not in (1, processes):
        raise UserError(
            f"hydra.launcher starts {tasks} tasks for each run, which has runtime.processes={processes}: "
            f"expected runtime.processes={tasks}, or one task"
        )


def run(todo: list[Plan], cluster: str, settings: DictConfig, show: pool.Show, more: pool.More) -> dict[str, Status]:
    """Run jobs on a cluster; result and errors as `pool.run`.

    Args:
        todo: it gets the jobs that `more` adds, each time as an array of their own.
        cluster: submitit's name of it.
        settings: as `check` returns them.

    Raises:
        Stopped: SIGINT or SIGTERM. Jobs that Slurm has keep running there; those on this machine save and end.
        UserError: the cluster cannot be used from here, or refuses a setting.
    """
    status: dict[str, Status] = {}
    new = list(todo)
    while new:
        status |= {job.id: states.before(job) for job in new}
        _run_array(new, status, cluster, settings, show)
        new = more(status)
        todo += new
    return status


def _run_array(
    todo: list[Plan], status: dict[str, Status], cluster: str, settings: DictConfig, show: pool.Show
) -> None:
    """Run jobs as one array, and keep `status` up to date."""
    missing = [job for job in todo if status[job.id].name != "done"]
    with stop_signals() as stopped:
        array = _Array(missing, cluster, settings) if missing else None
        while array and not stopped:
            status |= array.look()
            show(status)
            if all(status[job.id].name in FINAL for job in missing):
                break
            time.sleep(_POLL_SECONDS)
        if stopped and array:
            array.scheduler.end()
    if stopped:
        raise Stopped(stopped[0], f"stopped by {signal.Signals(stopped[0]).name}; jobs that a scheduler has go on")
    show(status)


class _Here:
    """Jobs in processes of this machine, as `slurm.Queue` is of jobs in Slurm."""

    def __init__(self, submitted: list[Any]) -> None:
        self._submitted = submitted

    def look(self) -> None:
        """There is nobody to ask."""

    def has(self, number: int) -> bool:
        return not self._submitted[number].done()

    def waits(self, number: int) -> bool:
        return False

    def outcome(self, number: int) -> Status | None:
        return None if self.has(number) else Status("failed", "signal", "its process ended without a word")

    def end(self) -> None:
        """The jobs save and end."""
        for one in self._submitted:
            one._process.terminate()
        for one in self._submitted:
            one._process.wait()


class _Array:
    """Jobs that are submitted together."""

    def __init__(self, missing: list[Plan], cluster: str, settings: DictConfig) -> None:
        self.jobs = missing
        self.before = {job.id: states.record(job) for job in missing}
        parent, *_ = (pool.make_output_folder(job).absolute() / "submitit" for job in missing)
        parent.mkdir(exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=parent))
        found = _submit(missing, cluster, settings, folder)
        self.scheduler = _Here(found) if cluster == "local" else Queue([job.job_id for job in found], folder)

    def look(self) -> dict[str, Status]:
        """Each job's status by its run folder and the scheduler."""
        self.scheduler.look()
        return {job.id: self._look(number) for number, job in enumerate(self.jobs)}

    def _look(self, number: int) -> Status:
        job, scheduler = self.jobs[number], self.scheduler
        has_begun = states.record(job) != self.before.get(job.id)
        found = states.status(job) if has_begun else states.WAITING
        if found.name == "done" or (found.name == "failed" and not scheduler.has(number)):
            return found
        if scheduler.waits(number):  # also one that is to run again
            return states.WAITING
        lost = scheduler.outcome(number)
        if lost is None or in_use(job.folder):
            # One that was stopped may be started again.
            return states.WAITING if found == states.WAITING else states.RUNNING
        if found.name not in FINAL:
            found = pool.write_outcome(job, lost)
            self.before.pop(job.id, None)
        return found


def _submit(missing: list[Plan], cluster: str, settings: DictConfig, folder: Path) -> list[Any]:
    import submitit

    os.environ["PYTHONSAFEPATH"] = "1"  # as in the pool
    given = {str(name): value for name, value in settings.items() if name not in ("_target_", _FOLDER)}
    own = {name if name in _COMMON else f"{cluster}_{name}": value for name, value in given.items()}
    timeouts = own.pop(f"{cluster}_max_num_timeout", 0)
    try:
        executor = submitit.AutoExecutor(folder, cluster=cluster, **{f"{cluster}_max_num_timeout": timeouts})
        executor.update_parameters(**own)
        return list(executor.map_array(_Work(), missing))
    except (RuntimeError, ValueError, submitit.core.utils.FailedJobError) as error:
        raise UserError(f"the cluster takes no jobs from here: {str(error).strip().splitlines()[-1]}") from None


# -- what runs in a job ------------------------------------------------------------------------------------------------


class _Work:
    """One job, in the process that submitit has for it; `checkpoint` lets submitit run it again."""

    def __call__(self, job: Plan) -> None:
        from posbench.launch.ranks import own_rank

        requeue = signal.getsignal(signal.SIGUSR2)  # submitit's, for preemption and the time limit: it ends unsaved
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        parent = os.getppid()
        end_after(lambda: wait_for_parent(parent))
        with _gpu(job) as slot:
            code = pool.run_job(job, slot, own_rank())
        if code == 128 + signal.SIGUSR2 and callable(requeue):
            requeue(signal.SIGUSR2, None)
        sys.exit(code)

    def checkpoint(self, job: Plan) -> Any:
        import submitit

        return submitit.helpers.DelayedSubmission(self, job)


@contextlib.contextmanager
def _gpu(job: Plan) -> Iterator[dict[str, str]]:
    """Environment variables that confine a job to its GPUs, free ones if there are any: jobs here lock theirs."""
    runtime = job.config.runtime
    slots = pool.gpus(runtime.processes or 1) if runtime.device in ("auto", "cuda") else [{}]
    number = zlib.crc32(job.id.encode()) % len(slots)
    with contextlib.ExitStack() as held:
        for free in range(len(slots)) if len(slots) > 1 else ():
            try:
                lock = files.lock(job.output.parent / f".gpu-{socket.gethostname()}-{free}.lock")
            except BlockingIOError:
                continue
            held.callback(os.close, lock)
            number = free
            break
        yield slots[number]
