"""What a run folder says of itself. Its id stands in `run.json`, follows from the
settings in `config.yaml`, and is in the manifest of each checkpoint and in each row.

Whoever opens a folder compares these: a file that is another run's is refused.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posbench import files
from posbench.config.identity import run_id
from posbench.config.schema import AnyConfig, load_plain, load_saved
from posbench.errors import UserError
from posbench.run import CONFIG, RECORD

SCHEMA = 3  # the version of a run folder
STATUSES = ("running", "done", "failed", "stopped")
RESTART = "'posbench train ... --restart' moves it aside and trains anew"

# What `run.json` has, with types; all but the first three may be null.
_NUMBER = (int, float)
FIELDS: dict[str, type | tuple[type, ...]] = {
    "schema": int,
    "id": str,
    "status": str,
    "reason": str,
    "message": str,
    "command": str,
    "attempt": dict,
    "data": dict,
    "tokenizer_sha256": str,
    "parameters": dict,
    "installed_encodings": dict,
    "support": dict,
    "wandb": dict,
    "evaluated": dict,
    "tokens": _NUMBER,
    "train_seconds": _NUMBER,
    "cpu_seconds": _NUMBER,
    "evaluate_seconds": _NUMBER,
    "peak_memory_bytes": _NUMBER,
}
_ALWAYS = ("schema", "id", "status")


def load_record(folder: Path) -> dict[str, Any]:
    """Return the `run.json` of a run folder. Raises UserError if it cannot be read or
    is no record.
    """
    path = folder / RECORD
    try:
        record = files.read_json(path)
    except UserError as error:
        raise UserError(f"{error}; {RESTART}") from None
    for key, kind in FIELDS.items():
        value = record.get(key)
        if value is None and key not in _ALWAYS:
            continue
        if not isinstance(value, kind) or isinstance(value, bool):
            raise _no_record(path, key, value, "another value")
    if record["schema"] != SCHEMA:
        raise _no_record(path, "schema", record["schema"], str(SCHEMA))
    if record["status"] not in STATUSES:
        raise _no_record(path, "status", record["status"], ", ".join(STATUSES))
    return record


def _no_record(path: Path, key: str, value: Any, expected: str) -> UserError:
    found = json.dumps(value)
    return UserError(f"{path}: {key} is {found}: expected {expected}; {RESTART}")


def load_settings(folder: Path) -> dict[str, Any]:
    """Return the `config.yaml` of a run folder as plain data. Raises UserError if it
    cannot be read, or is not the configuration of the run that `run.json` names.
    """
    path = folder / CONFIG
    record = load_record(folder)
    try:
        settings = load_plain(path)
    except UserError as error:
        raise UserError(f"{error}; {cure(record)}") from None
    try:
        found = run_id(settings)
    except (LookupError, TypeError, AttributeError, ValueError):
        found = "no run"
    wrong = other_run(found, record)
    if wrong:
        raise UserError(f"{path} {wrong}; {cure(record)}")
    return settings


def load_any(folder: Path) -> AnyConfig:
    """Return the configuration of a run folder, or of an evaluated model's. Raises as
    `load_settings` does, and if it is not valid.
    """
    load_settings(folder)
    try:
        return load_saved(folder / CONFIG)
    except UserError as error:
        raise UserError(f"{error}; {cure(load_record(folder))}") from None


def cure(record: Mapping[str, Any]) -> str:
    """Return how `config.yaml` and `rows.jsonl` are mended."""
    command = record.get("command") or "the command that made this run"
    return f"it is mended by: {command}"


def other_run(found: Any, record: Mapping[str, Any]) -> str:
    """Return what is wrong if the id in a part of a run folder is not that of its
    record, else an empty text.
    """
    if found == record["id"]:
        return ""
    return f"is that of {found or 'no run'}: expected {record['id']}"
