"""What `posbench evaluate RUN key=value ...` changes in a run's evaluation settings. Comma lists are lists here."""

import dataclasses
from typing import Any

import yaml

from posbench.config.schema import Config, EvaluationConfig, validate
from posbench.errors import UserError, did_you_mean

# The words of the command line for the fields that are lists.
_SINGULAR = {"protocol": "protocols", "ratio": "ratios", "extension": "extensions", "task": "tasks"}
_FIELDS = [field.name for field in dataclasses.fields(EvaluationConfig)]
_KEYS = ["length", *_SINGULAR, *_FIELDS, "device", "threads"]


def apply(config: Config, overrides: list[str]) -> tuple[EvaluationConfig, str | None, int | None]:
    """The run's evaluation settings with overrides applied, and the device and the number of threads if given.

    `length=128,256` is in tokens, `ratio=2,4` in training lengths. Keys may carry their section: evaluation.split=test.
    Other lengths are scored on targets that allow the run's own lengths too, so that all of them are paired.

    Raises:
        UserError: an override that cannot be read, an unknown key or a value that does not fit.
    """
    plain: dict[str, Any] = dataclasses.asdict(config.evaluation)
    elsewhere: dict[str, Any] = {"device": None, "threads": None}
    for text in overrides:
        key, value = _parse(text)
        if key == "length":
            plain["ratios"] = _ratios(text, value, config.training.train_length)
        elif key in elsewhere:
            elsewhere[key] = value
        else:
            field = _SINGULAR.get(key, key)
            is_list = isinstance(plain[field], tuple)
            plain[field] = tuple(value if isinstance(value, list) else [value]) if is_list else value
    if plain["longest"] is None:
        plain["longest"] = config.evaluation.ratios[-1]
    settings = validate(EvaluationConfig, plain, "evaluation")
    dataclasses.replace(config, evaluation=settings)  # checks it against the training length
    device, threads = elsewhere["device"], elsewhere["threads"]
    if threads is not None and (not isinstance(threads, int) or threads < 1):
        raise UserError(f"threads is {threads!r}: expected at least 1")
    return settings, None if device is None else str(device), threads


def _parse(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    key = key.removeprefix("evaluation.").removeprefix("runtime.")
    if not equals or not value:
        raise UserError(f"cannot read '{text}': expected key=value, such as length=128,256")
    if key not in _KEYS:
        raise UserError(f"unknown key '{key}'{did_you_mean(key, _KEYS)} (evaluate takes {', '.join(_KEYS)})")
    items = [yaml.safe_load(item) for item in value.strip("[]").split(",") if item]
    return key, items[0] if len(items) == 1 else items


def _ratios(text: str, value: Any, train_length: int) -> tuple[float, ...]:
    lengths = value if isinstance(value, list) else [value]
    if not all(isinstance(length, int) and length >= train_length for length in lengths):
        raise UserError(f"'{text}': expected lengths in tokens, from the training length {train_length} on")
    return tuple(length / train_length for length in sorted(set(lengths)))
