"""A very small model on a text file, for sweeps that end in seconds, and what a run comes to."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import support

from posbench.launch.plans import Plan
from posbench.run.rows import evaluation_rows, training_rows
from posbench.training.train import train

TINY = [
    *support.TINY,
    "data.path=text.txt",
    "training.tokens=512",
    "training.precision=fp32",
    "runtime.log_every_steps=1",
]
_NO_SECONDS = {"seconds", "peak_memory_bytes"}  # of an evaluation row: how long it took, not what came out


def one_by_one(todo: list[Plan], outputs: Path) -> None:
    """Run each job as a single run below another folder, in this process."""
    for job in todo:
        train(job.config, outputs / job.id, ["posbench", "train"])


def result(folder: Path) -> tuple[bytes, list[dict[str, Any]], list[float]]:
    """Weights, evaluation rows and losses of a run."""
    newest = max((folder / "checkpoint").glob("step-*"))
    rows = [{k: v for k, v in row.to_json().items() if k not in _NO_SECONDS} for row in evaluation_rows(folder)]
    losses = [row["train/loss"] for row in training_rows(folder) if "train/loss" in row]
    return (newest / "model.safetensors").read_bytes(), rows, losses


def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """Wait for a condition; fail if it never comes true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
