"""A sweep's Slurm array: its tasks run here by bash, in place of a cluster."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from support import TINY, each_once, snapshot, until, write_text

from posbench.errors import UserError
from posbench.launch import plans, pool, sweep

WORDS = [
    *TINY,
    "data.path=text.txt",
    "training.tokens=512",
    "runtime.cache=cache",
    "log_every_steps=1",
]
SBATCH = """#!/bin/bash
printf '%s\\n' "$@" > given
echo '7;cluster'
"""


SCONTROL = """#!/bin/sh
echo $* > requeued
"""


def write_program(path: Path, script: str) -> None:
    path.write_text(script)
    path.chmod(0o755)


@pytest.fixture(autouse=True)
def cluster(tmp_path, monkeypatch):
    """Enter a folder with a blank in its name; fake `sbatch` and `scontrol` record
    their arguments.
    """
    folder = tmp_path / "a folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    write_text()
    programs = tmp_path / "bin"
    programs.mkdir()
    write_program(programs / "sbatch", SBATCH)
    write_program(programs / "scontrol", SCONTROL)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    return folder


ARGUMENTS = ["encoding=rope,alibi", *WORDS]


def test_a_dry_run_submits_nothing(cluster, capsys):
    before = snapshot(cluster)
    sweep.sweep(ARGUMENTS, dry_run=True, slurm_options="--time=60")
    assert "2 runs: 0 finished, 2 to do" in capsys.readouterr().out
    assert snapshot(cluster) == before


def test_missing_runs_are_submitted_as_one_array(capsys):
    sweep.sweep(ARGUMENTS, slurm_options="--partition main --time=60")
    assert capsys.readouterr().out.startswith("Slurm job 7 has 2 tasks, logs in ")
    given = Path("given").read_text().splitlines()
    assert "--array=0-1" in given
    assert "--partition" in given
    assert "main" in given
    assert "--time=60" in given


def test_several_tasks_are_the_processes_of_one_run(tmp_path):
    write_program(tmp_path / "bin/srun", "#!/bin/sh\nprintf '%s\\n' \"$@\" > started\n")
    sweep.sweep(["encoding=rope", *WORDS], slurm_options="--ntasks=2")
    *_, script = Path("given").read_text().splitlines()
    environment = {**os.environ, "SLURM_ARRAY_TASK_ID": "0", "SLURM_NTASKS": "2"}

    subprocess.run(["bash", script], env=environment, check=True)

    started = Path("started").read_text().splitlines()
    assert started[0] == "--kill-on-bad-exit"
    assert "encoding=rope" in started
    assert started[-1] == "processes=2"


def test_slurm_starts_no_processes_here():
    submits = "--slurm submits what is missing and ends: leave out"
    with pytest.raises(UserError, match=submits):
        sweep.sweep(ARGUMENTS, n_jobs=2, slurm_options="")


def test_options_with_an_open_quotation_mark_are_refused_before_anything_is_done(
    cluster,
):
    before = snapshot(cluster)
    with pytest.raises(UserError, match="--slurm: cannot read --time='60: No closing"):
        sweep.sweep(ARGUMENTS, slurm_options="--time='60")
    assert snapshot(cluster) == before


def test_what_sbatch_refuses_is_one_line(tmp_path):
    refusing = "#!/bin/sh\necho 'sbatch: error: invalid partition' >&2\nexit 1\n"
    (tmp_path / "bin/sbatch").write_text(refusing)
    with pytest.raises(UserError, match=r"^sbatch: error: invalid partition$"):
        sweep.sweep(ARGUMENTS, slurm_options="")


def test_a_machine_without_slurm_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="there is no sbatch here"):
        sweep.sweep(ARGUMENTS, slurm_options="")


# A limit that comes at once leaves no time to train, however often the task is queued.
SIGNALS = [
    (signal.SIGUSR1, 100, ["requeue 7_0"]),
    (signal.SIGTERM, 100, []),
    (signal.SIGUSR1, -100, []),
]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "seconds", "queued"), SIGNALS)
def test_a_task_near_its_time_limit_saves_its_run_and_is_queued_again(
    number, seconds, queued
):
    long = each_once([*WORDS, "training.tokens=64000000"])
    arguments = ["encoding=rope", *long]
    sweep.sweep(arguments, slurm_options="")
    (plan,) = plans.resolve([arguments])
    rows = plan.folder / "rows.jsonl"
    environment = {
        **os.environ,
        "SLURM_ARRAY_TASK_ID": "0",
        "SLURM_ARRAY_JOB_ID": "7",
        "SLURM_CPUS_PER_TASK": "1",
        "SECONDS": str(seconds),
    }
    *_, script = Path("given").read_text().splitlines()

    task = subprocess.Popen(["bash", script], env=environment)
    until(lambda: rows.exists() and rows.stat().st_size > 0)
    task.send_signal(number)

    assert task.wait() == 143
    assert pool.record_of(plan).status == "stopped"
    requeued = Path("requeued")
    lines = []
    if requeued.exists():
        lines = requeued.read_text().splitlines()
    assert lines == queued
