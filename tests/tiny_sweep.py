"""A very small model on a text file, for sweeps that end in seconds, and what a run comes to."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import support

from posbench.launch import plans, states
from posbench.launch.plans import Plan
from posbench.run_folder.jsonl import read_jsonl
from posbench.run_folder.rows import evaluation_rows
from posbench.training.train import train

TINY = [
    *support.TINY,
    "data.path=text.txt",
    "training.tokens=512",
    "training.precision=fp32",
    "runtime.log_every_steps=1",
]
SHORT, LONG = "training.tokens=64000", "training.tokens=64000000"  # 1,000 updates, and more than any test awaits
_OF_CELLS = [*(override for override in TINY if not override.startswith("training.tokens=")), "runtime.cache=cache"]
_NO_SECONDS = {"seconds", "peak_memory_bytes"}  # of an evaluation row: how long it took, not what came out


def one_by_one(todo: list[Plan], outputs: Path) -> None:
    """Run each job as a single run below another folder, in this process."""
    for job in todo:
        train(job.config, outputs / job.id, ["posbench", "train"])


def result(folder: Path) -> tuple[bytes, list[dict[str, Any]], list[float]]:
    """Weights, evaluation rows and losses of a run."""
    newest = max((folder / "checkpoint").glob("step-*"))
    rows = [{k: v for k, v in row.to_json().items() if k not in _NO_SECONDS} for row in evaluation_rows(folder)]
    losses = [row["train/loss"] for row in read_jsonl(folder / "metrics.jsonl")]
    return (newest / "model.safetensors").read_bytes(), rows, losses


def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """Wait for a condition; fail if it never comes true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def cells(*sets: str) -> list[Plan]:
    """What a sweep file with these sets of overrides, each with its SHORT or LONG, comes to, after writing it."""
    Path("configs/sweep").mkdir(parents=True)
    Path("configs/sweep/mine.yaml").write_text("sets:\n" + "".join(f"- {one}\n" for one in sets))
    return plans.resolve([[*_OF_CELLS, *one.split()] for one in sets])


def start_cells(*launcher: str) -> "subprocess.Popen[str]":
    """`posbench sweep` over them through one of Hydra's launchers."""
    command = [sys.executable, "-m", "posbench", "sweep", "--config-dir", "configs", "sweep=mine"]
    return subprocess.Popen(
        [*command, *_OF_CELLS, *launcher], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def end_of(process: "subprocess.Popen[str]", seconds: float = 240.0) -> tuple[int, str]:
    """Exit code and output of a sweep, which ends within so many seconds."""
    try:
        output, _ = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, output


def trains(job: Plan) -> Callable[[], bool]:
    """Whether the run has made some updates."""
    return lambda: states.progress(job)[0] > 5


def assert_named(output: str, job: Plan, overrides: str) -> None:
    """A sweep's output has a line with the job, the overrides that tell it from the others, and what became of it."""
    status = states.status(job)
    assert f"{job.id} [{overrides}] {status.name} ({status.reason})" in output
