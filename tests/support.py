"""What several test files need: a run that takes milliseconds, a text for it, the command line, a folder's contents."""

import os
import sys
from pathlib import Path

from posbench.cli.app import main

# A very small model, by its overrides; the files say how many tokens it trains on.
TINY = [
    "tracking=none",
    "data=text",
    "data.tokenizer=bytes",
    "model.n_layers=1",
    "model.d_model=16",
    "model.n_heads=2",
    "training.train_length=16",
    "training.batch_size=4",
    "training.warmup_tokens=0",
    "evaluation.ratios=[1,2]",
    "evaluation.targets=8",
    "evaluation.blocks=8",
    "runtime.device=cpu",
    "runtime.threads=1",
]


def write_text(folder: Path | str = ".") -> None:
    """The `text.txt` that it trains on."""
    words = [f"word{i * i % 97} follows number {i}." for i in range(3000)]
    Path(folder, "text.txt").write_text(" ".join(words), encoding="utf-8")


def posbench(*arguments: str) -> int:
    """Run the command line in this process; returns the exit code."""
    before, sys.argv = sys.argv, ["posbench", *arguments]
    try:
        return main()
    finally:
        sys.argv = before
        for name in ("POSBENCH_DEBUG", "POSBENCH_RESTART", "POSBENCH_FAILURES", "PYTHONSAFEPATH"):
            os.environ.pop(name, None)


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
