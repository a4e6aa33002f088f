"""A sweep's jobs through one of Hydra's launchers (joblib, submitit): its multirun over their saved configurations.

Hydra runs in a process of its own. What became of the jobs is read from their `run.json`, never from the scheduler's
accounting: without it, the submitting process would wait for a cancelled job for ever.
"""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from posbench import files, machine
from posbench.config import compose
from posbench.config.schema import load_saved
from posbench.config.shipped import configs_dir
from posbench.errors import RunFailed, Stopped, UserError
from posbench.runs.lock import in_use
from posbench.sweep import jobs, pool
from posbench.sweep.jobs import FINAL, Job, Status
from posbench.terminal.signals import stop_signals

_EXTRAS = {"joblib": ("joblib", "parallel"), "submitit": ("submitit", "slurm")}  # launcher: package, extra
_POLL_SECONDS = 1.0
SILENT_SECONDS = 300.0  # an unowned run of which nothing is heard so long is lost; Slurm's requeue takes two minutes
_END_SECONDS = 30.0  # for Hydra to end by itself once all jobs have


def check(overrides: list[str]) -> DictConfig:
    """Hydra's own configuration with `hydra/launcher=...` and `hydra.launcher.*` applied.

    Raises:
        UserError: an unknown launcher or setting, or one that is not installed.
    """
    name = next(o.partition("=")[2] for o in overrides if o.startswith("hydra/launcher="))
    package, extra = _EXTRAS.get(name.partition("_")[0], (None, None))
    if package and not importlib.util.find_spec(package):
        raise UserError(f"hydra/launcher={name} is not installed: pip install 'posbench[{extra}]'")
    return compose.launcher_config(overrides)


def threads(launcher: DictConfig, count: int) -> int:
    """CPU threads for each of so many jobs: what a job is given, or its share of this machine."""
    if launcher.get("cpus_per_task"):
        return int(launcher.cpus_per_task)
    jobs = int(launcher.get("n_jobs") or 1)
    cores = machine.cores()
    return max(1, cores // min(count, cores if jobs < 0 else jobs))


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
    before = {job.id: jobs.record(job) for job in missing}
    for job in missing:
        jobs.save(job)
    log = missing[0].saved.parent / "launcher.log"
    with stop_signals() as stopped, files.replaced(log) as output:
        process = _start(missing, overrides, output)
        all_final_since = None
        while process.poll() is None and not stopped:
            for job in missing:
                status[job.id] = _look(job, before[job.id])
            show(status)
            if any(one.name not in FINAL for one in status.values()):
                all_final_since = None
            elif time.monotonic() > (all_final_since := all_final_since or time.monotonic()) + _END_SECONDS:
                break
            time.sleep(_POLL_SECONDS)
        _end(process)
    if stopped:
        raise Stopped(stopped[0], f"stopped by {signal.Signals(stopped[0]).name}; jobs that a scheduler has go on")
    for job in missing:
        found = jobs.status(job)
        if found.name not in FINAL or jobs.record(job) == before[job.id]:
            lost = Status("failed", "error", f"the launcher ended without running it, its output is in {log}")
            found = pool.write_outcome(job, lost)
        status[job.id] = found
    show(status)
    return status


def _start(missing: list[Job], overrides: list[str], output: Any) -> "subprocess.Popen[bytes]":
    quoted = ",".join('"' + str(c.saved.absolute()).replace("\\", "\\\\").replace('"', '\\"') + '"' for c in missing)
    sweep_dir = missing[0].saved.parent.absolute() / "hydra"
    command = [sys.executable, "-P", "-m", "posbench.sweep.launcher", "--multirun", f"job={quoted}"]
    command += [f'hydra.sweep.dir="{sweep_dir}"', *overrides]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End Hydra and the local workers it started, if they have not ended; their jobs then save and end themselves."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:  # submitit ignores SIGTERM
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _look(job: Job, before: dict[str, Any]) -> Status:
    """The job's status by its run folder."""
    if jobs.record(job) == before:
        return jobs.WAITING
    found = jobs.status(job)
    if found.name not in ("running", "stopped"):
        return found
    if _silence(job) < SILENT_SECONDS or in_use(job.folder):
        return jobs.RUNNING  # or stopped, and the scheduler may start it again
    if found.name == "stopped":
        return found
    return pool.write_outcome(job, Status("failed", "signal", "its job ended without a word"))


def _silence(job: Job) -> float:
    """Seconds since the run wrote anything."""
    times = [path.stat().st_mtime for path in job.folder.glob("*.json*")]
    return time.time() - max(times, default=0.0)


# -- what runs in a job ------------------------------------------------------------------------------------------------


def run_job(cfg: DictConfig) -> None:
    """One job, in a process of its own: a launcher's workers are used again, and would keep what a run leaves."""
    saved = Path(cfg.job)
    job = Job((), load_saved(saved), saved)
    before = jobs.record(job)
    oom_kills = machine.oom_kills()
    status = pool.outcome(job, pool.start(job, {}).wait(), before, oom_kills=oom_kills)
    if status.name != "done":
        raise RunFailed(f"{job.id} {status.name}: {status.message}")


def main() -> None:
    """Hydra's multirun over `job=...`."""
    import hydra

    hydra.main(version_base="1.3", config_path=str(configs_dir()), config_name="job")(run_job)()


if __name__ == "__main__":
    from posbench.sweep import launcher  # so that workers find `run_job` under an importable name

    launcher.main()
