"""How fast this machine has trained runs, and how long further ones would take."""

import contextlib
import json
import math
import socket
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posbench.config.schema import Config, to_container
from posbench.errors import UserError
from posbench.run import RECORD
from posbench.run.saved import load_record, load_settings

RECENT = 10  # so many of the newest runs of a kind tell how fast this machine is
UNKNOWN = (
    "How long is not known: no run of this size, training length, optimizer, device and"
    " precision was made here."
)


def time_here(work: list[tuple[Config, float]], outputs: set[Path]) -> str:
    """Return a sentence on how long training takes, by the runs that this machine has
    trained in these folders; `work` has configurations, each with its tokens.
    """
    from posbench import machine  # it imports torch

    tokens_of_kind: dict[str, float] = {}
    for config, tokens in work:
        try:
            device = machine.resolve(config.runtime.device)
        except UserError:  # this machine lacks it
            return UNKNOWN
        dtype = machine.resolve_precision(config.training.precision, device)
        attempt = {
            "device": str(device),
            "dtype": machine.dtype_name(dtype),
            "processes": config.runtime.processes or 1,
        }
        kind = kind_of(to_container(config), attempt)
        tokens_of_kind[kind] = tokens_of_kind.get(kind, 0) + tokens

    speeds = speeds_here(set(tokens_of_kind), outputs)
    if speeds.keys() < tokens_of_kind.keys():
        return UNKNOWN
    seconds = sum(tokens / speeds[kind] for kind, tokens in tokens_of_kind.items())
    time = f"{seconds / 3600:.1f} hours"
    if seconds < 3600:
        time = f"{math.ceil(seconds / 60)} min"
    return f"About {time} of training, one run at a time, as runs here took."


def kind_of(settings: Mapping[str, Any], attempt: Mapping[str, Any]) -> str:
    """Return what the speed of a run depends on most, whatever its encoding, from its
    settings and what its record says of the attempt.
    """
    training = settings["training"]
    kind = [settings["model"], training["train_length"], training.get("optimizer")]
    kind.append(settings["runtime"].get("compile", False))
    kind += [attempt.get(key) for key in ("device", "dtype", "processes")]
    return json.dumps(kind, sort_keys=True)


def speeds_here(kinds: set[str], outputs: set[Path]) -> dict[str, float]:
    """Return the median tokens per second of each kind of runs that this machine has
    trained, by the newest `RECENT` of the kind.
    """
    records = set[Path]()
    for folder in outputs:
        records.update(folder.glob(f"*/*/{RECORD}"))
    newest_first = sorted(records, key=lambda path: -path.stat().st_mtime)
    speeds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for path in newest_first:
        if all(len(found) == RECENT for found in speeds.values()):
            break
        with contextlib.suppress(UserError):  # a folder that cannot be read
            record = load_record(path.parent)
            is_here = record.attempt.get("host") == socket.gethostname()
            is_done = record.status == "done"
            if is_done and is_here and record.tokens and record.train_seconds:
                kind = kind_of(load_settings(path.parent), record.attempt)
                found = speeds.get(kind, [])
                if len(found) < RECENT:
                    found.append(record.tokens / record.train_seconds)
    return {kind: statistics.median(found) for kind, found in speeds.items() if found}
