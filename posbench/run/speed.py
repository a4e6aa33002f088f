"""How fast this machine has trained runs, and how long further ones would take."""

import contextlib
import math
import socket
import statistics
from pathlib import Path
from typing import Any

from posbench.config.schema import Config
from posbench.errors import UserError
from posbench.run import RECORD
from posbench.run.folder import load_config
from posbench.run.saved import load_record

RECENT = 50  # so many of the newest runs tell how fast this machine is


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
            is_done = record.status == "done"
            if is_done and is_here and record.tokens and record.train_seconds:
                speed = record.tokens / record.train_seconds
                size = size_of(load_config(path.parent))
                speeds.setdefault(size, []).append(speed)
    return {size: statistics.median(each) for size, each in speeds.items()}


def size_of(config: Config) -> Any:
    """Return what the speed of a run depends on most, whatever its encoding."""
    return config.model, config.training.train_length, config.training.optimizer


def time_text(seconds: float) -> str:
    """Return a sentence on how long training takes; NaN: that is not known."""
    if math.isnan(seconds):
        return "How long is not known: no run of such a size was made here."
    time = f"{seconds / 3600:.1f} hours"
    if seconds < 3600:
        time = f"{math.ceil(seconds / 60)} min"
    return f"About {time} of training, one run at a time, as runs here took."
