"""W&B's own agent runs posbench for a sweep, against a server on this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import wandb_server
import yaml
from support import TINY, evaluation_lines, write_text

pytestmark = pytest.mark.slow


def test_the_agent_of_a_sweep_runs_posbench_and_its_run_has_the_objective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_text()
    tiny = [word for word in TINY if word != "tracking=none"]
    settings = [*tiny, "data.path=text.txt", "training.tokens=640", "cache=c"]
    command = [sys.executable, "-m", "posbench", "train", *settings, "${args_no_hyphens}"]
    chosen = {"encoding": {"value": "alibi"}, "training.learning_rate": {"value": 0.00123}}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    with wandb_server.serve() as server:
        server.sweep = yaml.safe_dump({"method": "random", "command": command, "parameters": {}})
        server.commands = [{"type": "run", "run_id": "r1", "program": "posbench", "args": chosen}]
        done = subprocess.run(
            [sys.executable, "-m", "wandb", "agent", "me/theirs/sw33p"],
            env=inherited | server.environment() | {"NETRC": str(tmp_path / "none"), "WANDB_CACHE_DIR": "wc"},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        assert server.unknown == []
        (run,) = server.runs.values()
    assert (run.name, run.last("sweep"), run.last("project"), run.exit_code) == ("r1", "sw33p", "theirs", 0)
    assert run.config["training"]["learning_rate"] == 0.00123
    (record,) = Path("outputs").glob("*/alibi-*/run.json")
    assert json.loads(record.read_text())["wandb"]["id"] == "r1"
    rows = evaluation_lines(record.parent)
    assert run.summary["nll_1x"] == pytest.approx(rows[0]["nll"], abs=1e-5)  # from sums of four decimals
    assert run.summary["status"] == "done"
