"""A very small model on a text file, for sweeps that end in seconds, and what a run comes to."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posbench.runs.jsonl import read_jsonl
from posbench.runs.rows import evaluation_rows
from posbench.sweep.jobs import Job
from posbench.training.train import train

TINY = [
    "tracking=none",
    "data=text",
    "data.path=text.txt",
    "data.tokenizer=bytes",
    "model.n_layers=1",
    "model.d_model=16",
    "model.n_heads=2",
    "training.train_length=16",
    "training.batch_size=4",
    "training.tokens=512",
    "training.warmup_tokens=0",
    "training.precision=fp32",
    "evaluation.ratios=[1,2]",
    "evaluation.targets=8",
    "evaluation.blocks=8",
    "evaluation.bootstrap=20",
    "runtime.device=cpu",
    "runtime.threads=1",
    "runtime.log_every_steps=1",
]
_NO_SECONDS = {"seconds", "peak_memory_bytes"}  # of an evaluation row: how long it took, not what came out


def write_text() -> None:
    """The `text.txt` that the sweeps train on, in the current folder."""
    words = [f"word{i * i % 97} follows number {i}." for i in range(3000)]
    Path("text.txt").write_text(" ".join(words), encoding="utf-8")


def one_by_one(todo: list[Job], outputs: Path) -> None:
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
