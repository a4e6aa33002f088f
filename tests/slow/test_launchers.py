"""Sweeps through Hydra's launchers on this machine: the same runs as without one, and failures recorded alike."""

import json
import os
import signal
from pathlib import Path

import pytest
from support import write_text
from tiny_sweep import LONG, SHORT, TINY, assert_named, cells, end_of, one_by_one, result, start_cells, trains, until

import posbench.report
from posbench.errors import PosbenchError
from posbench.launch import plans, states, sweep
from posbench.launch.plans import Plan
from posbench.launch.states import Status

pytestmark = pytest.mark.slow
pytest.importorskip("submitit")
SUBMITIT = ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5"]


def test_a_launcher_gives_the_runs_that_the_pool_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(posbench.report, "main", lambda paths: None, raising=False)
    write_text()
    overrides = ["seed=0", *TINY, "runtime.cache=cache"]
    good, bad = ["encoding=rope,alibi", *overrides], ["encoding=none", *overrides, "training.learning_rate=1e30"]
    (tmp_path / "configs/sweep").mkdir(parents=True)
    (tmp_path / "configs/sweep/mine.yaml").write_text(
        "sets:\n- encoding=rope,alibi\n- encoding=none training.learning_rate=1e30\n"
    )
    with pytest.raises(PosbenchError, match="1 run of 3 not done: none-s0-"):
        sweep.sweep(["sweep=mine", *overrides, *SUBMITIT], config_dir=tmp_path / "configs")
    todo = plans.resolve([good])
    one_by_one(todo, tmp_path / "single")
    for job in todo:
        assert states.status(job) == Status("done")
        assert result(job.folder) == result(tmp_path / "single" / job.id)
    (failed,) = plans.resolve([bad])
    assert states.status(failed).reason == "diverged"

    sweep.sweep([*good, *SUBMITIT])  # nothing is left to do
    assert [len(states.record(job)["attempts"]) for job in todo] == [1, 1]


def trainer(job: Plan) -> int:
    """The process that trains, once it does."""
    until(trains(job))
    return int(json.loads((job.folder / ".lock").read_text())["pid"])


def parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def test_each_of_four_cells_meets_its_fate_and_the_sweep_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is killed, one is asked to end, one fails, and one is done."""
    monkeypatch.chdir(tmp_path)
    write_text()
    sets = [f"encoding=rope {LONG}", f"encoding=alibi {LONG}", f"encoding=none {SHORT} training.learning_rate=1e30"]
    killed, asked, *_ = todo = cells(*sets, f"encoding=sinusoidal {SHORT}")
    process = start_cells(*SUBMITIT)
    os.kill(trainer(killed), signal.SIGKILL)
    os.kill(trainer(asked), signal.SIGTERM)
    code, output = end_of(process)
    assert code == 1, output
    found = [(states.status(job).name, states.status(job).reason) for job in todo]
    assert found == [("failed", "signal"), ("stopped", "signal"), ("failed", "diverged"), ("done", None)]
    for job, one in zip(todo, sets, strict=False):
        assert_named(output, job, one)


def test_what_a_killed_worker_leaves_behind_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What trains saves itself once its worker is gone."""
    monkeypatch.chdir(tmp_path)
    write_text()
    orphan, good = cells(f"encoding=rope {LONG}", "encoding=alibi training.tokens=640000")
    process = start_cells(*SUBMITIT)
    os.kill(parent(trainer(orphan)), signal.SIGKILL)
    code, output = end_of(process)
    assert code == 1, output
    assert [(states.status(job).name, states.status(job).reason) for job in (orphan, good)] == [
        ("stopped", "signal"), ("done", None),
    ]  # fmt: skip
