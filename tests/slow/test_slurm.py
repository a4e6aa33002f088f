"""Sweeps on a real Slurm (scripts/slurm_local.sh starts one on this machine), without its accounting."""

import multiprocessing
import shutil
import subprocess
from pathlib import Path

import pytest
from support import write_text
from tiny_sweep import TINY, one_by_one, result, until

import posbench.report
from posbench import sweep
from posbench.errors import PosbenchError
from posbench.sweep import jobs, launcher
from posbench.sweep.jobs import Status

SLURM = ["hydra/launcher=submitit_slurm", "hydra.launcher.cpus_per_task=1", "hydra.launcher.mem_gb=1"]
SLURM += ["hydra.launcher.timeout_min=5"]


def idle() -> bool:
    if not shutil.which("sinfo"):
        return False
    return subprocess.run(["sinfo", "-h", "-o", "%T"], capture_output=True, text=True).stdout.strip() == "idle"


pytestmark = [pytest.mark.slow, pytest.mark.skipif(not idle(), reason="no Slurm here: scripts/slurm_local.sh start")]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("submitit")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(posbench.report, "main", lambda paths: None, raising=False)
    write_text()


def sweep_exit_code(arguments: list[str]) -> None:
    try:
        sweep.sweep(arguments)
    except PosbenchError as error:
        raise SystemExit(error.exit_code) from None


def test_slurm_gives_the_runs_that_the_pool_gives(tmp_path: Path) -> None:
    arguments = ["encoding=rope,alibi", *TINY, "runtime.cache=cache"]
    sweep.sweep([*arguments, *SLURM])
    todo = jobs.expand([arguments])
    one_by_one(todo, tmp_path / "single")
    for job in todo:
        assert jobs.status(job) == Status("done")
        assert result(job.folder) == result(tmp_path / "single" / job.id)


def test_a_cancelled_job_is_recorded_and_its_sweep_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "SILENT_SECONDS", 5.0)  # without accounting Hydra itself would wait for ever
    longer = [override for override in TINY if not override.startswith("training.tokens=")]  # 15,625 updates
    arguments = ["encoding=rope", *longer, "runtime.cache=cache"]
    (job,) = jobs.expand([arguments])
    process = multiprocessing.get_context("fork").Process(target=sweep_exit_code, args=([*arguments, *SLURM],))
    process.start()
    until(lambda: jobs.progress(job)[0] > 5)
    queued = subprocess.run(["squeue", "-h", "-o", "%A"], capture_output=True, text=True, check=True).stdout.split()
    subprocess.run(["scancel", *queued], check=True)
    process.join()
    assert process.exitcode == 1
    assert (jobs.status(job).name, jobs.status(job).reason) == ("stopped", "signal")
