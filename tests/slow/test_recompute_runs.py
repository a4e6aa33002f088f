"""Runs on the built-in corpus, recomputed from its text and their weights by a script that does without posbench."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a run and its recomputation, on a busy machine too

SCRIPT = Path(__file__).parents[2] / "scripts" / "recompute.py"
SMALL = ["model.n_layers=2", "model.d_model=64", "training.tokens=32768", "training.warmup_tokens=0"]
SMALL += ["evaluation.protocols=[fixed_target,nonoverlap]", "evaluation.ratios=[1,3,8]", "evaluation.blocks=32"]
SMALL += ["tracking=none", "runtime.device=cpu", "runtime.threads=1", "runtime.cache=../cache"]


@pytest.fixture(scope="module", params=["encoding=rope", "encoding=alibi training.precision=fp32"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    command = [sys.executable, "-m", "posbench", "train", *request.param.split(), *SMALL]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = folder.glob("outputs/demo/[!.]*")
    return made


def recomputed(run: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(run), "--threads", "1", *options]
    return subprocess.run(command, cwd=run, capture_output=True, text=True)


def test_every_number_of_a_run_follows_from_its_weights_and_the_raw_text(run: Path) -> None:
    done = recomputed(run)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()[1:-1]
    assert len(lines) == 3 + 2 + 3 + 3  # two lengths have a windowed baseline
    assert all(" equal " in line and "DIFFER" not in line for line in lines)


def test_a_number_that_was_changed_afterwards_is_found(run: Path) -> None:
    file = run / "rows.jsonl"
    before = file.read_text(encoding="utf-8")
    first, *others = [line for line in before.splitlines(keepends=True) if '"protocol"' in line]
    row = json.loads(first)
    try:
        file.write_text("".join([json.dumps({**row, "nll": row["nll"] - 0.01}) + "\n", *others]), encoding="utf-8")
        done = recomputed(run, "--lengths", str(row["length"]))
    finally:
        file.write_text(before, encoding="utf-8")
    assert done.returncode == 1, done.stdout + done.stderr
    assert [line.endswith("<-") for line in done.stdout.splitlines()[1:-1]] == [True, False, False]
