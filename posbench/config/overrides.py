"""`key=value` as it is typed, read the same way by train, sweep, evaluate and bench.

Settings of evaluation and runtime may leave out their section, and a list may have the name of its items:
`protocol=sliding`, `device=cpu`. `length=128,256` is in tokens, `ratio=2,4` in training lengths. A comma list of an
evaluation setting is always a list, never a sweep: such settings do not make another run, so there is nothing to
compare. Values are those of Hydra's grammar: `on` and `12:30` are text, `1e-4` is a number.
"""

import dataclasses
import glob
import os
import re
import typing
from collections.abc import Iterable
from typing import Any, NamedTuple

from posbench.config import keys
from posbench.config.schema import Config, EvaluationConfig, RuntimeConfig, validate
from posbench.errors import UserError, did_you_mean, unknown

LENGTH = "evaluation.length"  # not a key of the configuration: it sets evaluation.ratios
_LISTS = {f"evaluation.{f.name}" for f in dataclasses.fields(EvaluationConfig) if typing.get_origin(f.type) is tuple}
_SINGULAR = {"protocol": "protocols", "ratio": "ratios", "extension": "extensions", "task": "tasks"}
_EVALUATION = {f.name: f"evaluation.{f.name}" for f in dataclasses.fields(EvaluationConfig)}
_EVALUATION |= {one: f"evaluation.{many}" for one, many in _SINGULAR.items()} | {"length": LENGTH, "lengths": LENGTH}
_RUNTIME = {f.name: f"runtime.{f.name}" for f in dataclasses.fields(RuntimeConfig)}
WORDS = {**_EVALUATION, **_RUNTIME}  # what may be typed without its section, and the key it stands for
_KEYS = (
    WORDS | {f"evaluation.{w}": k for w, k in _EVALUATION.items()} | {f"runtime.{w}": k for w, k in _RUNTIME.items()}
)
OF_A_SWEEP = ("sweep", "tune", "tune_grid")  # what `posbench sweep` takes beside what its runs take
# What `posbench evaluate` takes: what is measured on the way through training is none of it.
OF_A_FINISHED_RUN = [*(word for word in _EVALUATION if word != "at_tokens"), "device", "threads", "processes"]

FILES = ("data.path", "data.dataset", "data.tokenizer", "start")  # keys whose values may be files, of whatever name
_INTEGER = re.compile(r"[+-]?(0|[1-9](_?\d)*)")
_DIGITS = r"\d(?:_?\d)*"
_FLOAT = re.compile(rf"[+-]?(?!\d+\Z)(({_DIGITS}\.?({_DIGITS})?|\.{_DIGITS})(e[+-]?\d+)?|inf|nan)", re.IGNORECASE)
_CONSTANTS = {"null": None, "true": True, "false": False}
_QUOTED = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"")


def parted(text: str, example: str = "") -> tuple[str, str]:
    """The full key of an override and its value as it was typed. Raises UserError if it is no key=value."""
    key, equals, typed = text.partition("=")
    if not key or not equals:
        expected = f": expected key=value, such as {example}" if example else keys.word(text)
        raise UserError(f"cannot read '{text}'{expected}")
    return full_key(key), typed


def start_of(overrides: Iterable[str]) -> str:
    """What training is to begin from: the value of `start`, empty if it is not given."""
    return next((text.partition("=")[2] for text in overrides if text.startswith("start=")), "")


def refuse_twice(keys: Iterable[str], where: str = "") -> None:
    """Refuse a key that is given twice, since one of the values would be ignored; `where` begins the message."""
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            raise UserError(f"{where}{key} is given twice: give it once")
        seen.add(key)


def full_key(key: str) -> str:
    """`evaluation.protocols` for `protocol`; any other key is returned as it is."""
    return _KEYS.get(key, key)


def value(typed: str) -> Any:
    """A value as it was typed: null, true, false, a number, text, a mapping, or a list in brackets or with commas."""
    typed = typed.strip()
    parts = items(typed)
    if len(parts) > 1:
        return [value(part) for part in parts if part]
    if typed.startswith("[") and typed.endswith("]"):
        return [value(part) for part in items(typed[1:-1]) if part]
    if typed.startswith("{") and typed.endswith("}"):
        pairs = (part.partition(":") for part in items(typed[1:-1]) if part)
        return {str(_scalar(key.strip())): value(inner) for key, _, inner in pairs}
    return _scalar(typed)


def typed_value(key: str, typed: str) -> Any:
    """The value of a full key as it was typed: an existing file's name stands as it is, and some settings are lists."""
    if key in FILES and is_there(typed):
        return typed
    given = value(typed)
    return [given] if key in (*_LISTS, LENGTH) and not isinstance(given, list) else given


def is_there(path: str) -> bool:
    """Whether there is such a file, folder or glob."""
    path = os.path.expanduser(path)
    return os.path.exists(path) or any(glob.iglob(path, recursive=True))


def items(text: str) -> list[str]:
    """Split at commas outside quotation marks and brackets."""
    found, start, depth, quote = [], 0, 0, ""
    for at, char in enumerate(text):
        if quote:
            quote = "" if char == quote and text[at - 1] != "\\" else quote
        elif char in "'\"" and not text[start:at].strip():
            quote = char
        elif char in "[]{}()":
            depth += 1 if char in "[{(" else -1
        elif char == "," and depth == 0:
            found.append(text[start:at].strip())
            start = at + 1
    return [*found, text[start:].strip()]


def _scalar(text: str) -> Any:
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if quoted := _QUOTED.fullmatch(text):
        return re.sub(r"\\(['\"\\])", r"\1", quoted[1] if quoted[1] is not None else quoted[2])
    return text


# -- evaluation settings -----------------------------------------------------------------------------------------------


class Asked(NamedTuple):
    """How a finished run is to be evaluated; None: that was not given."""

    settings: EvaluationConfig
    device: str | None = None
    threads: int | None = None  # of the CPU
    processes: int | None = None


def apply(config: Config, overrides: list[str]) -> Asked:
    """Apply overrides to a run's evaluation settings.

    New lengths are scored on targets that the run's own lengths allow too, so that all rows are paired.

    Raises:
        UserError: an override that cannot be read, an unknown key or a value that does not fit.
    """
    evaluation: dict[str, Any] = dataclasses.asdict(config.evaluation)
    runtime: dict[str, Any] = dataclasses.asdict(config.runtime)
    given: list[str] = []
    for text in overrides:
        key, typed = parted(text, "length=128,256")
        section, _, field = key.partition(".")
        if key not in map(WORDS.get, OF_A_FINISHED_RUN):
            near = did_you_mean(key, OF_A_FINISHED_RUN, keys.SIMILAR)
            raise unknown("key", key, (), f"evaluate takes {', '.join(OF_A_FINISHED_RUN)}", near)
        if not typed:
            raise UserError(f"cannot read '{text}': expected key=value, such as length=128,256")
        if key == LENGTH:
            refuse_lengths_of_problems(config)
            evaluation["ratios"] = ratios(typed_value(key, typed), config.training.train_length)
        elif section == "evaluation":
            evaluation[field] = typed_value(key, typed)
        else:
            runtime[field] = typed_value(key, typed)
        given.append(key)
    refuse_twice(given)
    refuse_both(given)
    if evaluation["longest"] is None:
        evaluation["longest"] = max(1.0, config.evaluation.ratios[-1])
    settings = validate(EvaluationConfig, evaluation, "evaluation")
    where = validate(RuntimeConfig, runtime, "runtime")
    dataclasses.replace(config, evaluation=settings)  # checks it against the training length
    names = ("device", "threads", "processes")
    return Asked(settings, **{name: getattr(where, name) for name in names if f"runtime.{name}" in given})


def ratios(lengths: list[Any], train_length: int) -> tuple[float, ...]:
    """Lengths in tokens as multiples of the training length, each once, ascending.

    Raises:
        UserError: not whole numbers from 1 on.
    """
    if not lengths or not all(type(length) is int and length >= 1 for length in lengths):
        told = ",".join(map(str, lengths))
        raise UserError(f"length is {told}: expected lengths in tokens, such as {train_length // 2},{2 * train_length}")
    return tuple(length / train_length for length in sorted(set(lengths)))


def refuse_lengths_of_problems(config: Config) -> None:
    """Refuse lengths in tokens for a task, whose problems have lengths of their own."""
    if config.data.task is not None:
        told = f"length is in tokens of text, but data '{config.data.name}' is a task"
        raise UserError(f"{told}: give ratio=2,4, in longest trained problems")


def refuse_both(keys: Iterable[str]) -> None:
    """Refuse `length` beside `ratios`: both set the evaluated lengths."""
    if {LENGTH, "evaluation.ratios"} <= set(keys):
        raise UserError("length and evaluation.ratios set the same lengths: give one of them")
