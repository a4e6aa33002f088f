"""Reads the `.wandb` file of an offline run: a LevelDB-style log of protobuf records.

After a 7-byte file header come 32 KiB blocks (the first one counts the header). A record is cut into pieces, each with
a 7-byte head: crc32 and length of the piece, and whether it is whole (1), first (2), middle (3) or last (4).
"""

import dataclasses
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

_BLOCK, _HEAD = 32768, struct.Struct("<IHB")


@dataclasses.dataclass(frozen=True)
class OfflineRun:
    run_id: str
    group: str
    project: str
    tags: list[str]
    config: dict[str, Any]
    history: list[dict[str, Any]]  # one dictionary per logged row, W&B's own keys left out
    axes: dict[str, str]  # metric name -> its x axis
    hidden: list[str]  # metrics without a panel
    not_summarised: list[str]  # metrics whose last value is not the run's
    artifacts: dict[str, list[str]]  # type -> files
    summary: dict[str, Any]


def read(path: Path) -> OfflineRun:
    """Everything the tests ask of a run."""
    records = [Record.FromString(data) for data in _records(path.read_bytes())]
    runs = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    history = [record.history.item for record in records if record.WhichOneof("record_type") == "history"]
    metrics = [record.metric for record in records if record.WhichOneof("record_type") == "metric"]
    artifacts = [record.artifact for record in records if record.WhichOneof("record_type") == "artifact"]
    summaries = [record.summary.update for record in records if record.WhichOneof("record_type") == "summary"]
    return OfflineRun(
        run_id=runs[0].run_id,
        group=runs[0].run_group,
        project=runs[0].project,
        tags=list(runs[0].tags),
        config=_values(runs[0].config.update),
        history=[_values(items) for items in history],
        axes={metric.name: metric.step_metric for metric in metrics if metric.step_metric},
        hidden=[metric.name for metric in metrics if metric.options.hidden],
        not_summarised=[metric.name for metric in metrics if metric.summary.none],
        artifacts={artifact.type: [entry.path for entry in artifact.manifest.contents] for artifact in artifacts},
        summary={key: value for items in summaries for key, value in _values(items).items()},
    )


def _values(items: Any) -> dict[str, Any]:
    named = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
    return {name: value for name, value in named.items() if not name.startswith("_")}


def _records(data: bytes) -> Iterator[bytes]:
    assert data.startswith(b":W&B"), data[:7]
    at, whole = 7, b""
    while at + _HEAD.size <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEAD.size:
            at += left
            continue
        _, length, kind = _HEAD.unpack_from(data, at)
        if kind == 0:  # padding
            at += left
            continue
        piece = data[at + _HEAD.size : at + _HEAD.size + length]
        if len(piece) < length:  # the tail that a kill cut off
            return
        at += _HEAD.size + length
        whole = piece if kind in (1, 2) else whole + piece
        if kind in (1, 4):
            yield whole
