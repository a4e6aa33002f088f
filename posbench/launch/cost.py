"""What the runs of a sweep cost: runs, tokens, and hours on this machine."""

import contextlib
import math
import shlex
import socket
import statistics
from pathlib import Path
from typing import Any

from posbench.config.schema import Config
from posbench.errors import UserError
from posbench.launch import pool
from posbench.launch.plans import Plan
from posbench.run import RECORD, checkpoint
from posbench.run.run import load_config
from posbench.run.saved import load_record
from posbench.terminal import console

RECENT = 50  # runs, by whose speed hours are told


def cost(todo: list[Plan]) -> str:
    """Return the commands of plans that are not finished, one per line, then how many
    runs and tokens those are, and how long they take.
    """
    lines = []
    n_finished = 0
    tokens = 0
    seconds = 0.0  # NaN, if no run of such a size was made here
    speeds = speeds_here({plan.folder.parent.parent for plan in todo})
    for plan in todo:
        if pool.is_finished(plan):
            n_finished += 1
            continue
        if plan.command:  # a trial of a learning rate has none
            lines.append(shlex.join(plan.command))
        is_evaluated_only = pool.is_trained(plan) and checkpoint.every(plan.folder)
        if not is_evaluated_only:
            training = plan.config.training
            n_tokens = training.steps * training.tokens_per_step
            tokens += n_tokens
            seconds += n_tokens / speeds.get(size_of(plan.config), math.nan)

    runs = console.plural(len(todo), "run")
    counts = f"{n_finished} finished, {len(todo) - n_finished} to do"
    lines.append(f"{runs}: {counts}, {tokens:,} tokens to train on.")
    if math.isnan(seconds):
        lines.append("How long is not known: no run of such a size was made here.")
    elif seconds:
        hours = f"{seconds / 3600:.1f} hours"
        lines.append(
            f"About {hours} of training, one run at a time, as runs here took."
        )
    lines.append("Nothing was run or written.")
    return "\n".join(lines)


def speeds_here(outputs: set[Path]) -> dict[Any, float]:
    """Return the median tokens per second of runs that this machine has trained, of
    each size, by the newest `RECENT` runs in these folders.
    """
    records = set[Path]()
    for folder in outputs:
        records.update(folder.glob(f"*/*/{RECORD}"))
    newest = sorted(records, key=lambda path: path.stat().st_mtime)[-RECENT:]
    speeds: dict[Any, list[float]] = {}
    for path in newest:
        with contextlib.suppress(UserError):  # a folder that cannot be read
            record = load_record(path.parent)
            is_here = record.attempt.get("host") == socket.gethostname()
            if record.status == "done" and is_here and record.train_seconds:
                speed = (record.tokens or 0) / record.train_seconds
                size = size_of(load_config(path.parent))
                speeds.setdefault(size, []).append(speed)
    return {size: statistics.median(each) for size, each in speeds.items()}


def size_of(config: Config) -> Any:
    """Return what the speed of a run depends on most, whatever its encoding."""
    return config.model, config.training.train_length, config.training.optimizer
