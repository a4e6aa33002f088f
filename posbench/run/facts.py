"""What is known of a run from its folder: its settings, and how it ended."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from posbench.config.digest import encoding_of_id, one_number
from posbench.config.schema import flat
from posbench.run.folder import in_use
from posbench.run.saved import STATUSES, load_record, load_settings

# what `Facts.run_status` may be of a run that has not failed
NOT_FAILED = {*STATUSES, "died"} - {"failed"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts of a run, which each of its rows has as columns. What is not known is
    None.
    """

    study: str | None
    encoding: str  # of a model from elsewhere, the model's name
    seed: int
    run_status: str  # done, running, stopped, died, or why it failed
    run_reason: str | None
    train_length: int
    learning_rate: float | None
    trained_tokens: int | None
    trained_task: str | None
    parameters: int | None
    encoding_parameters: int | None
    train_seconds: float | None
    cpu_seconds: float | None
    text: str | None  # its name
    text_sha256: str | None
    text_split: str | None
    tokenizer_sha256: str | None
    installed_encodings: str  # JSON: digests of their files
    command: str | None
    settings: str  # JSON, by dotted key


def facts_of(folder: Path) -> Facts:
    """Return the facts of a run without importing its encoding. Raises UserError if
    they cannot be read.
    """
    record = load_record(folder)
    container = load_settings(folder)
    settings = flat_settings(container)

    # A model that was only evaluated here has a name in place of an encoding.
    name = "model.name" if "reading" in container else "encoding.name"
    status = record.status
    if status == "failed":
        status = record.reason or status
    elif status == "running" and not in_use(folder):
        status = "died"
    return Facts(
        study=settings.get("study"),
        encoding=settings[name],
        seed=settings.get("seed", 0),  # 0: unknown, it was trained elsewhere
        run_status=status,
        run_reason=record.message,
        train_length=settings["training.train_length"],
        learning_rate=settings.get("training.learning_rate"),
        trained_tokens=record.tokens,
        trained_task=settings.get("data.task.name"),
        parameters=record.parameters.get("total"),
        encoding_parameters=record.parameters.get("encoding"),
        train_seconds=record.train_seconds,
        cpu_seconds=record.cpu_seconds,
        text=record.data.get("name"),
        text_sha256=record.text_sha256,
        text_split=record.data.get("split"),
        tokenizer_sha256=record.tokenizer_sha256,
        installed_encodings=as_json(record.installed_encodings),
        command=record.command,
        settings=as_json(settings),
    )


def flat_settings(container: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration's settings by dotted key, without those that are unset.

    `start.encoding` is that of the run that training began from.
    """
    settings = {}
    for key, value in one_number(flat(container)).items():
        if value is not None:
            settings[key] = value
    if "start.run" in settings:
        name = Path(settings["start.run"]).name
        settings["start.encoding"] = encoding_of_id(name)
    return settings


def as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
