"""JSON lines, and values as they stand in them."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


def number(value: object) -> float | None:
    """A finite number from a file, None if it is anything else."""
    if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) > 1e300:
        return None
    return float(value) if math.isfinite(value) else None
