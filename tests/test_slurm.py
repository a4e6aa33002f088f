"""A sweep's Slurm array: its tasks run here by bash, in place of a cluster."""

import os
import subprocess
from pathlib import Path

import pytest
from support import snapshot, write_text
from tiny_sweep import TINY, one_by_one, result, until

from posbench.errors import UserError
from posbench.launch import plans, states, sweep

SBATCH = """#!/bin/bash
printf '%s\\n' "$@" > given
echo 7
"""


@pytest.fixture(autouse=True)
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a blank in its name as the current one; `sbatch` and `scontrol` note what they are given."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    write_text()
    (tmp_path / "bin").mkdir()
    for name, script in (("sbatch", SBATCH), ("scontrol", "#!/bin/sh\necho $* > requeued\n")):
        (tmp_path / "bin" / name).write_text(script)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    return folder


def start_task(number: int) -> "subprocess.Popen[bytes]":
    script = Path("given").read_text().splitlines()[-1]
    environment = {"SLURM_ARRAY_TASK_ID": str(number), "SLURM_ARRAY_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1"}
    return subprocess.Popen(["bash", script], env={**os.environ, **environment})


def test_the_tasks_of_an_array_are_the_runs_and_the_same_sweep_submits_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["encoding=rope,alibi", *TINY, "runtime.cache=cache"]
    sweep.sweep(arguments, slurm_options="--partition main --time=60")
    assert capsys.readouterr().out.startswith("Slurm job 7 has 2 tasks, logs in ")
    assert {"--array=0-1", "--partition", "main", "--time=60"} <= set(Path("given").read_text().splitlines())
    rope, alibi = plans.resolve([arguments])
    assert start_task(1).wait() == 0
    assert not rope.folder.exists()
    one_by_one([alibi], tmp_path / "single")
    assert result(alibi.folder) == result(tmp_path / "single" / alibi.id)
    sweep.sweep(arguments, slurm_options="")
    assert "--array=0-0" in Path("given").read_text()
    assert start_task(0).wait() == 0
    assert states.status(rope).name == "done"


def test_a_task_near_its_time_limit_saves_its_run_and_is_queued_again() -> None:
    long = [word for word in TINY if not word.startswith("training.tokens=")] + ["training.tokens=64000000"]
    sweep.sweep(["encoding=rope", *long, "runtime.cache=cache"], slurm_options="")
    (job,) = plans.resolve([["encoding=rope", *long, "runtime.cache=cache"]])
    for name, queued in (("USR1", "requeue 7_0\n"), ("TERM", None)):
        task = start_task(0)
        rows = job.folder / "rows.jsonl"
        size = rows.stat().st_size if rows.exists() else 0
        until(lambda size=size, rows=rows: rows.exists() and rows.stat().st_size > size)
        task.send_signal(getattr(__import__("signal"), f"SIG{name}"))
        assert task.wait() == 143
        assert states.status(job).name == "stopped"
        assert (Path("requeued").read_text() if Path("requeued").exists() else None) == queued
        Path("requeued").unlink(missing_ok=True)


def test_a_dry_run_writes_nothing_and_what_sbatch_refuses_is_one_line(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["encoding=rope,alibi", *TINY, "runtime.cache=cache"]
    before = snapshot(cluster)
    sweep.sweep(arguments, dry_run=True, slurm_options="--time=60")
    shown = capsys.readouterr().out
    assert shown.startswith("sbatch --parsable --array=0-1 ") and shown.count("-m posbench train encoding=") == 2
    assert snapshot(cluster) == before
    with pytest.raises(UserError, match="--slurm submits what is missing and ends: leave out"):
        sweep.sweep(arguments, n_jobs=2, slurm_options="")
    (tmp_path / "bin/sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition' >&2\nexit 1\n")
    with pytest.raises(UserError, match=r"^sbatch: error: invalid partition$"):
        sweep.sweep(arguments, slurm_options="")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="there is no sbatch here"):
        sweep.sweep(arguments, slurm_options="")
