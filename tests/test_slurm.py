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
echo 7
"""


@pytest.fixture(autouse=True)
def cluster(tmp_path, monkeypatch):
    """Enter a folder with a blank in its name; fake `sbatch` and `scontrol` record
    their arguments.
    """
    folder = tmp_path / "a folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    write_text()
    (tmp_path / "bin").mkdir()
    for name, script in (
        ("sbatch", SBATCH),
        ("scontrol", "#!/bin/sh\necho $* > requeued\n"),
    ):
        (tmp_path / "bin" / name).write_text(script)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    return folder


def test_missing_runs_are_submitted_as_one_array_and_what_sbatch_refuses_is_one_line(
    cluster, tmp_path, monkeypatch, capsys
):
    arguments = ["encoding=rope,alibi", *WORDS]
    before = snapshot(cluster)
    sweep.sweep(arguments, dry_run=True, slurm_options="--time=60")
    assert "2 runs: 0 finished, 2 to do" in capsys.readouterr().out
    assert snapshot(cluster) == before
    with pytest.raises(
        UserError, match="--slurm submits what is missing and ends: leave out"
    ):
        sweep.sweep(arguments, n_jobs=2, slurm_options="")
    sweep.sweep(arguments, slurm_options="--partition main --time=60")
    assert capsys.readouterr().out.startswith("Slurm job 7 has 2 tasks, logs in ")
    assert {"--array=0-1", "--partition", "main", "--time=60"} <= set(
        Path("given").read_text().splitlines()
    )
    (tmp_path / "bin/sbatch").write_text(
        "#!/bin/sh\necho 'sbatch: error: invalid partition' >&2\nexit 1\n"
    )
    with pytest.raises(UserError, match=r"^sbatch: error: invalid partition$"):
        sweep.sweep(arguments, slurm_options="")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="there is no sbatch here"):
        sweep.sweep(arguments, slurm_options="")


@pytest.mark.slow
def test_a_task_near_its_time_limit_saves_its_run_and_is_queued_again():
    arguments = ["encoding=rope", *each_once([*WORDS, "training.tokens=64000000"])]
    sweep.sweep(arguments, slurm_options="")
    (job,) = plans.resolve([arguments])
    rows = job.folder / "rows.jsonl"
    requeued = Path("requeued")
    # A limit that comes at once leaves no time to train, however often the task is
    # queued.
    cases = (
        (signal.SIGUSR1, 100, "requeue 7_0\n"),
        (signal.SIGTERM, 100, None),
        (signal.SIGUSR1, -100, None),
    )
    for number, seconds, queued in cases:
        environment = {
            "SLURM_ARRAY_TASK_ID": "0",
            "SLURM_ARRAY_JOB_ID": "7",
            "SLURM_CPUS_PER_TASK": "1",
        }
        environment |= {**os.environ, "SECONDS": str(seconds)}
        task = subprocess.Popen(
            ["bash", Path("given").read_text().splitlines()[-1]], env=environment
        )
        size = rows.stat().st_size if rows.exists() else 0
        until(lambda size=size: rows.exists() and rows.stat().st_size > size)
        task.send_signal(number)
        assert task.wait() == 143
        assert pool.record(job)["status"] == "stopped"
        assert (requeued.read_text() if requeued.exists() else None) == queued
        requeued.unlink(missing_ok=True)
