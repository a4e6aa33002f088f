"""Evaluation rows: what a row is, its key, and the two files they stand in."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posbench.runs.jsonl import read_jsonl
from posbench.runs.names import BLOCKS, EVALUATION

EVALUATION_KEY = ("protocol", "length", "stride", "window", "extension", "task", "split", "checkpoint_step")


def evaluation_rows(folder: Path) -> list[dict[str, Any]]:
    """Rows of `evaluation.jsonl`, the last of each key."""
    rows = read_jsonl(folder / EVALUATION)
    return list({_key(row): row for row in rows}.values())


def evaluation_blocks(folder: Path) -> list[dict[str, Any]]:
    """Lines of `evaluation_blocks.jsonl`, the last set of each key."""
    sets: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in read_jsonl(folder / BLOCKS):
        if line.get("block") == 0:
            sets[_key(line)] = []
        sets.setdefault(_key(line), []).append(line)
    return [line for lines in sets.values() for line in lines]


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(json.dumps(row.get(name)) for name in EVALUATION_KEY)
