"""Sweeps on a real Slurm, which scripts/slurm_local.sh starts on this machine: with its accounting and without."""

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import write_text
from tiny_sweep import LONG, SHORT, assert_named, cells, end_of, one_by_one, result, start_cells, trains, until

from posbench.launch import states
from posbench.launch.plans import Plan
from posbench.run_folder.rows import evaluation_rows

SCRIPT = Path(__file__).parents[2] / "scripts" / "slurm_local.sh"
SLURM = ["hydra/launcher=submitit_slurm", "hydra.launcher.cpus_per_task=1", "hydra.launcher.mem_gb=1"]
SLURM += ["hydra.launcher.timeout_min=5", "hydra.launcher.array_parallelism=2"]
CONFIGURATION = Path("/etc/slurm/slurm.conf")
INSTALL = "apt-get install slurm-wlm munge"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(shutil.which, ("slurmctld", "slurmd", "munged"))) or os.geteuid() != 0,
        reason=f"Slurm is not installed, or this is not root: {INSTALL}",
    ),
]


@pytest.fixture(scope="module", params=["", "--accounting"], ids=["without accounting", "with accounting"])
def slurm(request: pytest.FixtureRequest) -> Iterator[None]:
    """A Slurm on this machine, ended with the tests; one process of a parallel run has it at a time."""
    if CONFIGURATION.exists() and SCRIPT.name not in CONFIGURATION.read_text():
        pytest.skip(f"this machine has a Slurm of its own: {CONFIGURATION}")
    if request.param and not all(map(shutil.which, ("slurmdbd", "mariadbd"))):
        pytest.skip(f"Slurm's accounting is not installed: {INSTALL} slurmdbd mariadb-server")
    with open(SCRIPT, "rb") as one_at_a_time:
        fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
        subprocess.run(["sh", str(SCRIPT), "start", *filter(None, [request.param])], check=True)
        yield
        subprocess.run(["sh", str(SCRIPT), "stop"], check=True)


@pytest.fixture(autouse=True)
def elsewhere(slurm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    monkeypatch.chdir(tmp_path)
    write_text()


def in_queue() -> dict[str, str]:
    """What Slurm holds: state by the number in its array."""
    command = ["squeue", "--noheader", "--array", "--format=%i %T"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return dict(line.split() for line in lines)


def numbered(number: int) -> str:
    return next(name for name in in_queue() if name.endswith(f"_{number}"))


def attempts(job: Plan) -> int:
    return len(states.record(job)["attempts"])


def test_slurm_gives_the_runs_that_the_pool_gives(tmp_path: Path) -> None:
    todo = cells(f"encoding=rope,alibi {SHORT}")
    code, output = end_of(start_cells(*SLURM))
    assert code == 0, output
    one_by_one(todo, tmp_path / "single")
    for job in todo:
        assert result(job.folder) == result(tmp_path / "single" / job.id)


def test_two_tasks_of_a_job_are_the_processes_of_one_run(tmp_path: Path) -> None:
    todo = cells(f"encoding=rope,alibi {SHORT}")
    code, output = end_of(start_cells("processes=2", *SLURM, "hydra.launcher.tasks_per_node=2"))
    assert code == 0, output
    one_by_one(todo, tmp_path / "single")
    for job in todo:
        assert [attempt["processes"] for attempt in states.record(job)["attempts"]] == [2]
        found, expected = (evaluation_rows(folder) for folder in (job.folder, tmp_path / "single" / job.id))
        assert [row.nll for row in found] == pytest.approx([row.nll for row in expected], abs=1e-4)


def test_each_of_four_cells_meets_its_fate_and_the_sweep_ends(tmp_path: Path) -> None:
    """One is cancelled as it runs, one requeued, one fails, and one is cancelled before it has begun."""
    sets = [
        f"encoding=rope {LONG}",
        f"encoding=alibi {SHORT}",
        f"encoding=none {SHORT} training.learning_rate=1e30",
        f"encoding=sinusoidal {SHORT}",
    ]
    running, requeued, fails, queued = todo = cells(*sets)
    process = start_cells(*SLURM)
    until(lambda: any(name.endswith("_3") for name in in_queue()))
    assert in_queue()[numbered(3)] == "PENDING"
    subprocess.run(["scancel", numbered(3)], check=True)
    until(trains(running))
    subprocess.run(["scancel", numbered(0)], check=True)
    until(trains(requeued))
    subprocess.run(["scontrol", "requeue", numbered(1)], check=True)
    code, output = end_of(process)

    assert code == 1, output
    assert {job.id: states.status(job).name for job in todo} == {
        running.id: "stopped", requeued.id: "done", fails.id: "failed", queued.id: "stopped",
    }  # fmt: skip
    assert states.status(fails).reason == "diverged"
    assert states.status(queued).message == "cancelled in Slurm"
    for job, one in ((running, sets[0]), (fails, sets[2]), (queued, sets[3])):
        assert_named(output, job, one)
    assert attempts(requeued) == 2
    one_by_one([requeued], tmp_path / "single")
    assert result(requeued.folder) == result(tmp_path / "single" / requeued.id)
