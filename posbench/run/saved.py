"""What a run folder says of itself. Its id stands in `run.json`, follows from the
settings in `config.yaml`, and is in the manifest of each checkpoint and in each row.

Whoever opens a folder compares these: a file that is another run's is refused.
"""

import json
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posbench import files
from posbench.config.digest import run_id
from posbench.config.schema import AnyConfig, load_plain, load_saved
from posbench.errors import UserError
from posbench.run import CONFIG, RECORD

SCHEMA = 3  # the version of a run folder
STATUSES = ("running", "done", "failed", "stopped")
RESTART = "'posbench train ... --restart' moves it aside and trains anew"
_ALWAYS = ("schema", "id", "status")  # the fields without which there is no record


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What `run.json` holds. What is not known is None, or empty."""

    schema: int = SCHEMA
    id: str
    status: str  # one of `STATUSES`
    reason: str | None = None  # of the status: signal, or as errors have it
    message: str | None = None
    command: str | None = None  # the newest that trains the run
    # the newest: when and where, device, dtype
    attempt: dict[str, Any] = field(default_factory=dict)
    # of posbench and what it computes with
    versions: dict[str, Any] = field(default_factory=dict)
    # `meta` of the text, or of the task
    data: dict[str, Any] = field(default_factory=dict)
    tokenizer_sha256: str | None = None
    # how many, by part of the model
    parameters: dict[str, Any] = field(default_factory=dict)
    # digests of the files of encodings that are not posbench's
    installed_encodings: dict[str, Any] = field(default_factory=dict)
    # of a HuggingFace model: whether it is tested
    support: dict[str, Any] = field(default_factory=dict)
    # id, project and entity there
    wandb: dict[str, Any] = field(default_factory=dict)
    # the settings of its newest evaluation
    evaluated: dict[str, Any] = field(default_factory=dict)
    tokens: int | None = None  # trained on
    train_seconds: float | None = None
    cpu_seconds: float | None = None
    evaluate_seconds: float | None = None
    peak_memory_bytes: int | None = None

    @property
    def text_sha256(self) -> str | None:
        """The digest of the text, or of the task's problems."""
        return self.data.get("sha256")


def json_types(cls: type) -> dict[str, set[type]]:
    """Return the JSON types of each field of a dataclass. A whole number is a number,
    too.
    """
    by_name = {}
    for name, hint in typing.get_type_hints(cls).items():
        kinds = typing.get_args(hint) if type(hint) is types.UnionType else (hint,)
        by_name[name] = {typing.get_origin(kind) or kind for kind in kinds}
        if float in by_name[name]:
            by_name[name].add(int)
    return by_name


_TYPES = json_types(RunRecord)


def load_record(folder: Path) -> RunRecord:
    """Return the `run.json` of a run folder. Raises UserError if it cannot be read or
    is no record.
    """
    path = folder / RECORD
    try:
        found = files.read_json(path)
    except UserError as error:
        raise UserError(f"{error}; {RESTART}") from None
    values: dict[str, Any] = {}
    for name, allowed in _TYPES.items():
        value = found.get(name)
        if value is None and name not in _ALWAYS:
            continue
        if type(value) not in allowed:
            raise _no_record(path, name, value, "another value")
        values[name] = value
    record = RunRecord(**values)
    if record.schema != SCHEMA:
        raise _no_record(path, "schema", record.schema, str(SCHEMA))
    if record.status not in STATUSES:
        raise _no_record(path, "status", record.status, ", ".join(STATUSES))
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


def cure(record: RunRecord) -> str:
    """Return how `config.yaml` and `rows.jsonl` are mended."""
    command = record.command or "the command that made this run"
    return f"it is mended by: {command}"


def other_run(found: Any, record: RunRecord) -> str:
    """Return what is wrong if the id in a part of a run folder is not that of its
    record, else an empty text.
    """
    if found == record.id:
        return ""
    return f"is that of {found or 'no run'}: expected {record.id}"
