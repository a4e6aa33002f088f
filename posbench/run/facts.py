"""What is known of a run from its folder: its settings, and how it ended."""

import json
import re
from pathlib import Path
from typing import Any

from posbench.config.identity import one_number
from posbench.config.schema import flat
from posbench.run.run import in_use
from posbench.run.saved import load_record, load_settings

_RUN_NAME = re.compile(r"(.+)-s\d+-[0-9a-f]{8}")


def facts_of(folder: Path) -> dict[str, Any]:
    """Return the facts of a run by name, without importing its encoding.

    `settings` are JSON, by dotted key. Raises UserError if they cannot be read.
    """
    record = load_record(folder)
    container = load_settings(folder)
    settings = flat_settings(container)

    # A model that was only evaluated here has a name in place of an encoding.
    name = "model.name" if "reading" in container else "encoding.name"
    data = record.get("data") or {}
    parameters = record.get("parameters") or {}
    status = record["status"]
    if status == "failed":
        status = record.get("reason") or status
    elif status == "running" and not in_use(folder):
        status = "died"
    return {
        "asked_split": settings.get("evaluation.split", ""),
        "study": settings.get("study"),
        "encoding": settings[name],
        "seed": settings.get("seed", 0),  # 0: unknown, it was trained elsewhere
        "run_status": status,
        "run_reason": record.get("message"),
        "train_length": settings["training.train_length"],
        "learning_rate": settings.get("training.learning_rate"),
        "trained_tokens": record.get("tokens"),
        "trained_task": settings.get("data.task.name"),
        "parameters": parameters.get("total"),
        "encoding_parameters": parameters.get("encoding"),
        "train_seconds": record.get("train_seconds"),
        "cpu_seconds": record.get("cpu_seconds"),
        "text": data.get("name"),
        "text_sha256": data.get("sha256"),
        "text_split": data.get("split"),
        "tokenizer_sha256": record.get("tokenizer_sha256"),
        "installed_encodings": as_json(record.get("installed_encodings") or {}),
        "command": record.get("command"),
        "settings": as_json(settings),
    }


def flat_settings(container: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration's settings by dotted key, without those that are unset.

    `start.encoding` is that of the run that training began from.
    """
    settings = {}
    for key, value in one_number(flat(container)).items():
        if value is not None:
            settings[key] = value
    if "start.run" in settings:
        settings["start.encoding"] = None
        match = _RUN_NAME.match(Path(settings["start.run"]).name)
        if match:
            settings["start.encoding"] = match[1]
    return settings


def as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
