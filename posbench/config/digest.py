"""The identity of a run: a digest of all settings that shape its weights, in which a
path or a number has one spelling.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# sections that do not change a run's id
NOT_IDENTITY = ("study", "tracking", "evaluation", "runtime")


def run_id(settings: Mapping[str, Any]) -> str:
    """Return the id of what has these settings, as `config.yaml` has them: of a run
    `<encoding>-s<seed>-<8 hex digits>`, of a model from elsewhere
    `<name>-<8 hex digits>`.

    The digits are a digest of all that shapes a run's weights; of a model, of all that
    its numbers depend on. Settings of another version of posbench keep their id. Raises
    LookupError, TypeError or AttributeError for something that is no configuration.
    """
    data = dict(settings["data"])
    if data.get("text_sha256"):  # the same text, wherever it is
        del data["path"], data["name"]
    else:
        data.pop("text_sha256", None)  # as before texts had one
    of_tokenizer = data.pop("tokenizer_file_sha256", None)
    if of_tokenizer:  # the same tokenizer, wherever it is
        data["tokenizer"] = of_tokenizer
    if "reading" in settings:
        # the model's digest covers these
        del data["tokenizer"], data["vocab_size"]
        shaping = {
            "model": settings["model"]["sha256"],
            "reading": settings["reading"],
            "data": data,
            "train_length": settings["training"]["train_length"],
        }
        return f"{settings['model']['name']}-{digest(shaping)}"

    shaping = {key: settings[key] for key in settings if key not in NOT_IDENTITY}
    shaping["data"] = data
    encoding = shaping["encoding"] = dict(settings["encoding"])
    encoding.pop("file", None)  # a moved file is the same encoding
    training = shaping["training"] = dict(settings["training"])
    if training.get("optimizer") is None:
        # as before there was a choice
        for key in ("optimizer", "muon_ratio", "momentum"):
            training.pop(key, None)
    if settings["start"]:
        start = shaping["start"] = dict(settings["start"])
        del start["run"], start["options"]
    return f"{encoding['name']}-s{settings['seed']}-{digest(shaping)}"


def encoding_of_id(name: str) -> str | None:
    """Return the encoding in the id of a run; None for other names."""
    match = re.fullmatch(r"(.+)-s\d+-[0-9a-f]{8}", name)
    return match[1] if match else None


def digest(shaping: Mapping[str, Any]) -> str:
    """Return the 8 hex digits at the end of an id: a digest of all settings that the
    results depend on.
    """
    text = json.dumps(one_number(shaping), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def one_number(value: Any) -> Any:
    """Return 10000.0 as 10000, at any depth, so that `encoding.base=1e4` and
    `encoding.base=10000` are one run.
    """
    if isinstance(value, dict):
        return {key: one_number(item) for key, item in value.items()}
    if isinstance(value, list):
        return [one_number(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def relative_path(path: str) -> str:
    """Return a path relative to the current folder, which is known by its real name or
    by $PWD; absolute if outside.
    """
    absolute = Path(os.path.abspath(os.path.expanduser(path)))
    for folder in (Path.cwd(), Path(os.environ.get("PWD") or "/")):
        if absolute.is_relative_to(folder) and os.path.samefile(folder, "."):
            return absolute.relative_to(folder).as_posix()
    return str(absolute)
