"""JSON lines that a kill or a full disk cannot spoil: whole lines are appended or none, and half a line is dropped."""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from posbench import files
from posbench.errors import UserError


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, none if there is no file. A last line cut short is passed over.

    Raises:
        UserError: a whole line is not a JSON object.
    """
    if not path.exists():
        return []
    *lines, _ = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise UserError(f"line {number} of {path} is not a JSON object")
        rows.append(row)
    return rows


def append(path: Path, rows: Iterable[Mapping[str, Any]], durable: bool = False) -> None:
    """Append JSON lines: all of them, or none and an error. A half line from before is dropped first."""
    data = "".join(json.dumps(plain(row), allow_nan=False) + "\n" for row in rows).encode()
    with files.full_disk_as_failure(path, len(data)), open(path, "a+b", buffering=0) as file:
        end = drop_half_line(file)
        try:
            while data:
                data = data[file.write(data) :]
            if durable:
                os.fsync(file.fileno())
        except OSError:
            os.ftruncate(file.fileno(), end)
            raise


def drop_half_line(file: Any) -> int:
    """Truncate an open file after its last newline; returns where that is, in bytes."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - 65536)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    file.truncate(end)
    file.seek(end)
    return int(end)


def plain(value: Any) -> Any:
    """Plain JSON types; tensors and numpy numbers become numbers, what is not finite becomes None."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "item"):
        return plain(value.item())
    raise TypeError(f"{value!r} is not a plain value")


def shortened(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as `metrics.jsonl` has it: plain types, floats of seven digits; what is not finite is None."""
    return {key: float(f"{value:.7g}") if isinstance(value, float) else value for key, value in plain(row).items()}


def number(value: object) -> float | None:
    """A finite number from a file, None if it is anything else."""
    if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) > 1e300:
        return None
    return float(value) if math.isfinite(value) else None


def listed(path: Path, key: str) -> list[dict[str, Any]]:
    """Return the objects of a list in a JSON file; none if it is not such a file."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return []
    rows = content.get(key) if isinstance(content, dict) else None
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
