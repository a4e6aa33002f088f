"""A search with Hydra's Optuna sweeper: the real plugin asks for runs and is told what each of them comes to."""

import json
from pathlib import Path

import pytest
import yaml
from support import TINY, posbench, write_text

pytestmark = pytest.mark.slow
pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
SEARCH = ["-m", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1"]
RATE = "training.learning_rate=tag(log,interval(1e-4,1e-1))"


def test_the_best_of_a_search_is_the_run_with_the_best_objective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_text()
    settings = [*TINY, "data.path=text.txt", "training.tokens=640", "cache=c", "study=found", "objective=nll_2x"]
    assert posbench("train", *SEARCH, RATE, *settings) == 0
    found = yaml.safe_load(Path("outputs/found/optimization_results.yaml").read_text())
    by_run = {}
    for path in Path("outputs/found").glob("*/evaluation.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rate = yaml.safe_load((path.parent / "config.yaml").read_text())["training"]["learning_rate"]
        by_run[rate] = next(
            r["nll"] for r in rows if (r["protocol"], r["length"], r["window"]) == ("fixed_target", 32, None)
        )
    assert len(by_run) == 3
    assert found["best_value"] == pytest.approx(min(by_run.values()))
    assert found["best_params"]["training.learning_rate"] == pytest.approx(min(by_run, key=by_run.__getitem__))
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("Best by nll_2x: ") and " with training.learning_rate=" in last


def test_a_run_that_fails_is_a_failed_trial_and_the_search_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_text()
    settings = [*TINY, "data.path=text.txt", "training.tokens=640", "cache=c", "study=found"]
    space = ["hydra/sweeper/sampler=grid", "training.learning_rate=0.01,1e30"]
    assert posbench("train", *SEARCH[:2], "hydra.sweeper.n_jobs=1", *space, *settings) == 1
    assert len(list(Path("outputs/found").glob("*/run.json"))) == 2
    assert "1 run failed" in capsys.readouterr().err
