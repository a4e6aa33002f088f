"""A sweep's jobs through one of Hydra's launchers (joblib, submitit): its multirun over their saved configurations.

Hydra runs in a process of its own. It may end before the jobs do, or hang waiting for a job that has died. So the
outcome of a job is read from its `run.json`, and whether Slurm still holds it from the queue.
"""

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from posbench import files, machine
from posbench.config import compose
from posbench.config.schema import load_saved
from posbench.config.shipped import configs_dir
from posbench.errors import RunFailed, Stopped, UserError
from posbench.launch import jobs, pool
from posbench.launch.jobs import FINAL, Job, Status
from posbench.launch.slurm import Queue
from posbench.run_folder.lock import in_use
from posbench.terminal.signals import stop_signals

_EXTRAS = {"joblib": ("joblib", "parallel"), "submitit": ("submitit", "slurm")}  # launcher: package, extra
_POLL_SECONDS = 1.0
SILENT_SECONDS = 300.0  # without news, after which an unowned run counts as lost if there is no queue to ask
_END_SECONDS = 30.0  # for Hydra to end after its jobs, and for jobs that it left behind to begin
_FOLDER = "hydra.launcher.submitit_folder"


def check(overrides: list[str]) -> DictConfig:
    """Hydra's own configuration with `hydra/launcher=...` and `hydra.launcher.*` applied.

    Raises:
        UserError: an unknown launcher or setting, or one that is not installed.
    """
    name = next(o.partition("=")[2] for o in overrides if o.startswith("hydra/launcher="))
    package, extra = _EXTRAS.get(name.partition("_")[0], (None, None))
    if package and not importlib.util.find_spec(package):
        raise UserError(f"hydra/launcher={name} is not installed: pip install 'posbench[{extra}]'")
    if any(override.startswith(f"{_FOLDER}=") for override in overrides):
        raise UserError(f"{_FOLDER} is the sweep's own: a folder for each time that it is run, beside its runs")
    return compose.launcher_config(overrides)


def refuse_lone_tasks(launcher: DictConfig, processes: int) -> None:
    """Refuse several tasks of a scheduler that are not the processes of one run.

    Raises:
        UserError: the run has another number of them, or one.
    """
    tasks = int(launcher.get("nodes") or 1) * int(launcher.get("tasks_per_node") or 1)
    if tasks not in (1, processes):
        raise UserError(
            f"hydra.launcher starts {tasks} tasks for each run, which has runtime.processes={processes}: "
            f"expected runtime.processes={tasks}, or one task"
        )


def threads(launcher: DictConfig, count: int, processes: int = 1) -> int:
    """CPU threads for each process of so many jobs: `cpus_per_task`, or a share of this machine."""
    if launcher.get("cpus_per_task"):
        return int(launcher.cpus_per_task)
    jobs = int(launcher.get("n_jobs") or 1)
    cores = machine.cores()
    return max(1, cores // min(count, cores if jobs < 0 else jobs) // processes)


def run(todo: list[Job], overrides: list[str], show: pool.Show) -> dict[str, Status]:
    """Run jobs through a launcher; arguments, result and errors as `pool.run`.

    Raises:
        Stopped: SIGINT or SIGTERM. Jobs that a scheduler has keep running there.
    """
    status = {job.id: Status("done") if jobs.is_finished(job) else jobs.WAITING for job in todo}
    missing = [job for job in todo if status[job.id].name != "done"]
    if not missing:
        show(status)
        return status
    for job in missing:
        jobs.save(job)
    log = missing[0].saved.parent / "launcher.log"
    with stop_signals() as stopped, files.replaced(log) as output:
        launched = _Launched(missing, overrides, output)
        while not stopped:
            status |= launched.look()
            show(status)
            if launched.is_over(status):
                break
            time.sleep(_POLL_SECONDS)
        launched.end()
    if stopped:
        raise Stopped(stopped[0], f"stopped by {signal.Signals(stopped[0]).name}; jobs that a scheduler has go on")
    status |= launched.outcomes(log)
    show(status)
    return status


class _Launched:
    """Hydra's process and its jobs."""

    def __init__(self, missing: list[Job], overrides: list[str], output: Any) -> None:
        self.jobs = missing
        self.before = {job.id: jobs.record(job) for job in missing}
        parent = missing[0].saved.parent.absolute() / "hydra"
        parent.mkdir(exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=parent))
        slurm = "hydra/launcher=submitit_slurm" in overrides
        self.queue = Queue(folder / ".submitit", len(missing)) if slurm else None
        self.process = _start(missing, folder, overrides, output)
        self.all_final_since: float | None = None
        self.left_since: float | None = None  # Hydra has ended, its jobs not

    def look(self) -> dict[str, Status]:
        """Each job's status by its run folder and the queue."""
        if self.queue:
            self.queue.look()
        return {job.id: self._look(number) for number, job in enumerate(self.jobs)}

    def is_over(self, status: dict[str, Status]) -> bool:
        """Whether Hydra and the jobs have ended, or the jobs have and Hydra hangs."""
        now = time.monotonic()
        if any(status[job.id].name not in FINAL for job in self.jobs):
            self.all_final_since = None
            return self.process.poll() is not None and not self._leaves(now)
        self.all_final_since = self.all_final_since or now
        patience = 0.0 if self.queue else _END_SECONDS
        return self.process.poll() is not None or now > self.all_final_since + patience

    def outcomes(self, log: Path) -> dict[str, Status]:
        """Each job's status once all is over; what the jobs themselves could not write is written."""
        found = {job.id: jobs.status(job) if self._has_begun(job) else jobs.WAITING for job in self.jobs}
        for job in self.jobs:
            if found[job.id].name not in FINAL:
                what = "before it was done" if self._has_begun(job) else "without running it"
                why = f"the launcher ended {what}: {pool.last_words(log)} (its output is in {log})"
                found[job.id] = pool.write_outcome(job, Status("failed", "error", why))
        return found

    def end(self) -> None:
        """End Hydra, if it has not ended, and the local workers it started: their jobs then save and end themselves."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:  # submitit ignores SIGTERM
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    def _look(self, number: int) -> Status:
        job = self.jobs[number]
        found = jobs.status(job) if self._has_begun(job) else jobs.WAITING
        if found.name == "done" or (found.name == "failed" and not (self.queue and self.queue.has(number))):
            return found
        if self.queue and self.queue.waits(number):  # also one that is to run again
            return jobs.WAITING
        lost = self.queue.outcome(number) if self.queue else self._lost(job)
        if lost is None or in_use(job.folder):
            return jobs.WAITING if found == jobs.WAITING else jobs.RUNNING  # or stopped, and it may be started again
        if found.name not in FINAL:
            found = pool.write_outcome(job, lost)
            self.before.pop(job.id)
        return found

    def _has_begun(self, job: Job) -> bool:
        return jobs.record(job) != self.before.get(job.id)

    def _lost(self, job: Job) -> Status | None:
        """What is said of a begun run without an owner of which nothing is heard any more, where there is no queue."""
        times = [path.stat().st_mtime for path in job.folder.glob("*.json*")]
        if not self._has_begun(job) or time.time() - max(times, default=0.0) < SILENT_SECONDS:
            return None
        return Status("failed", "signal", "its job ended without a word")

    def _leaves(self, now: float) -> bool:
        """Whether Hydra, which has ended, leaves jobs behind that go on."""
        if self.left_since is None:
            self.left_since = now
            if self.queue:
                self.queue.look(now=True)
        if self.queue:
            return any(map(self.queue.holds, range(len(self.jobs))))
        starting = now < self.left_since + _END_SECONDS and _is_alive(self.process.pid)
        return starting or any(in_use(job.folder) for job in self.jobs)


def _start(missing: list[Job], folder: Path, overrides: list[str], output: Any) -> "subprocess.Popen[bytes]":
    quoted = ",".join('"' + str(c.saved.absolute()).replace("\\", "\\\\").replace('"', '\\"') + '"' for c in missing)
    command = [sys.executable, "-P", "-m", "posbench.launch.launcher", "--multirun", f"job={quoted}"]
    command += [f'hydra.sweep.dir="{folder}"', *overrides]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )


def _is_alive(group: int) -> bool:
    """Whether a process group has members."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


# -- what runs in a job ------------------------------------------------------------------------------------------------


def run_job(cfg: DictConfig) -> None:
    """One job, in a process of its own: a launcher's workers are used again, and would keep what a run leaves."""
    saved = Path(cfg.job)
    job = Job((), load_saved(saved), saved)
    from posbench.launch.ranks import own_rank

    if rank := own_rank():
        pool.start(job, {}, rank).wait()  # what becomes of the job, the first process says
        return
    before = jobs.record(job)
    oom_kills = machine.oom_kills()
    with _gpu(job) as slot:
        status = pool.outcome(job, pool.start(job, slot).wait(), before, oom_kills=oom_kills)
    if status.name != "done":
        raise RunFailed(f"{job.id} {status.name}: {status.message}")


@contextlib.contextmanager
def _gpu(job: Job) -> Iterator[dict[str, str]]:
    """What confines a job to the GPUs it needs, to such that no job beside it here has while there are any."""
    runtime = job.config.runtime
    slots = pool.gpus(runtime.processes or 1) if runtime.device in ("auto", "cuda") else [{}]
    number = zlib.crc32(job.id.encode()) % len(slots)
    with contextlib.ExitStack() as held:
        for free in range(len(slots)) if len(slots) > 1 else ():
            try:
                lock = files.lock(job.saved.parent / f".gpu-{socket.gethostname()}-{free}.lock")
            except BlockingIOError:
                continue
            held.callback(os.close, lock)
            number = free
            break
        yield slots[number]


def main() -> None:
    """Hydra's multirun over `job=...`."""
    import hydra

    hydra.main(version_base="1.3", config_path=str(configs_dir()), config_name="job")(run_job)()


if __name__ == "__main__":
    from posbench.launch import launcher  # so that workers find `run_job` under an importable name

    launcher.main()
