"""Sweeps through Hydra's launchers on this machine: the same runs as without one, and failures recorded alike."""

from pathlib import Path

import pytest
from support import write_text
from tiny_sweep import TINY, one_by_one, result

import posbench.report
from posbench import sweep
from posbench.errors import PosbenchError
from posbench.sweep import jobs
from posbench.sweep.jobs import Status

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("package", "settings"),
    [
        ("joblib", ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]),
        ("submitit", ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5"]),
    ],
)
def test_a_launcher_gives_the_runs_that_the_pool_gives(
    package: str, settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(package)
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
        sweep.sweep(["sweep=mine", *overrides, *settings], config_dir=tmp_path / "configs")
    todo = jobs.expand([good])
    one_by_one(todo, tmp_path / "single")
    for job in todo:
        assert jobs.status(job) == Status("done")
        assert result(job.folder) == result(tmp_path / "single" / job.id)
    (failed,) = jobs.expand([bad])
    assert jobs.status(failed).reason == "diverged"

    sweep.sweep([*good, *settings])  # nothing is left to do
    assert [len(jobs.record(job)["attempts"]) for job in todo] == [1, 1]
