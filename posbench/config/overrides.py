"""What is typed at the command line: key=value words, read the same way by train, sweep, evaluate and bench.

A value is read by the type of its key: text stands as it is typed, a comma list of a key that holds a list is one list,
and only mappings and options of encodings are YAML. Settings of evaluation and runtime may leave out their section:
`protocol=nonoverlap`, `device=cpu`. `length=128,256` is in tokens, `ratio=2,4` in training lengths.
"""

import contextlib
import dataclasses
import fnmatch
import logging
import re
from collections.abc import Collection
from typing import Any, NamedTuple

from posbench.config import schema, suggest
from posbench.config.identity import is_there
from posbench.config.schema import Config, EvaluationConfig, RuntimeConfig
from posbench.config.shipped import GROUPS, every
from posbench.errors import UserError

logger = logging.getLogger(__name__)
LENGTH, RATIOS = "evaluation.length", "evaluation.ratios"  # the first is no key: it sets the second
KEYS = schema.keys()
FILES = ("data.path", "data.tokenizer", "start")  # keys whose values may be files, of whatever name
OF_A_SWEEP = ("sweep", "tune", "tune_grid")  # what `posbench sweep` takes beside what its runs take
# What may be typed without its section, and the key it stands for.
WORDS = {field.name: f"evaluation.{field.name}" for field in dataclasses.fields(EvaluationConfig)}
WORDS |= {field.name: f"runtime.{field.name}" for field in dataclasses.fields(RuntimeConfig)}
WORDS |= {word: f"evaluation.{word}s" for word in ("protocol", "ratio", "extension", "task")}
WORDS |= {"length": LENGTH, "lengths": LENGTH}
# What `posbench evaluate` takes: what is measured on the way through training is none of it.
OF_A_FINISHED_RUN = [word for word, key in WORDS.items() if key.startswith("evaluation.") and word != "at_tokens"]
OF_A_FINISHED_RUN += ["device", "threads"]


def split(word: str) -> tuple[str, str]:
    """Return the full key of a key=value word and its value as it was typed. Raises UserError if it is none."""
    key, equals, text = word.partition("=")
    if not key or not equals:
        group = next((group for group in (*GROUPS, "sweep") if word in every(group)), None)
        near = f"did you mean '{group}={word}'?" if group else "expected key=value, such as encoding=alibi or seed=1"
        raise UserError(f"cannot read '{word}': {near}")
    section, _, name = key.rpartition(".")
    return WORDS.get(name, key) if section in ("", "evaluation", "runtime") else key, text


def start_of(words: Collection[str]) -> str:
    """Return what training is to begin from: the value of `start`, empty if it is not given."""
    return next((word[6:] for word in words if word.startswith("start=") and word != "start=null"), "")


def pairs(words: Collection[str]) -> dict[str, str]:
    """Return typed values by full key. Of a key that is given twice the later value holds, and a line says so.

    Beside `start`, `extension=yarn` is the encoding.
    """
    given: dict[str, str] = {}
    begins = start_of(words)
    for key, text in (split(re.sub("^extension=", "encoding=", word) if begins else word) for word in words):
        for other in (LENGTH, RATIOS) if key in (LENGTH, RATIOS) else (key,):  # those two set the same
            if other in given:
                logger.warning("%s=%s is followed by %s=%s, which holds", other, given.pop(other), key, text)
        given[key] = text
    return given


def values(key: str, text: str, names: Collection[str] = ()) -> list[str]:
    """Return the values of one override: those of `a,b`, `range(0,5)` or `glob(*)` over names, else the one.

    Evaluation makes no other run, so its lists are one value.
    """
    if key.startswith("evaluation.") or (key in FILES and is_there(text)):
        return [text]
    if match := re.fullmatch(r"range\((-?\d+),(-?\d+)\)", text):
        items = [str(number) for number in range(int(match[1]), int(match[2]))]
    elif (match := re.fullmatch(r"glob\((.+)\)", text)) and names:
        items = [name for name in fnmatch.filter(names, match[1]) if name.count("/") == match[1].count("/")]
    else:
        items = _items(text)
        if schema.kind(KEYS.get(key)).endswith("s") and not all(item.startswith("[") for item in items):
            return [text]
    if not items:
        raise UserError(f"{key}={text} matches nothing")
    return items


def value(key: str, text: str) -> Any:
    """Return the value of a full key as it was typed: an existing file's name stands as it is, whatever is in it."""
    kind = "ints" if key == LENGTH else schema.kind(KEYS.get(key))
    if (key in FILES and is_there(text)) or (kind != "yaml" and "${" in text):
        return text
    if kind.endswith("s"):
        items = _items(text.strip().removeprefix("[").removesuffix("]"))
        return [_one(key, kind[:-1], item) for item in items if item]
    return _one(key, kind, text)


def _one(key: str, kind: str, text: str) -> Any:
    if text == "null" or kind == "yaml":
        return read(text)
    if kind == "text":
        return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
    if (number := _number(text)) is None:
        raise suggest.invalid({"loc": (key,), "type": kind, "input": text}, KEYS)
    return number


def _number(text: str) -> int | float | None:
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(text)
    return None


def read(text: str) -> Any:
    """Return a value without a type, such as an option: a number, or YAML, where `{a:1}` needs no blank."""
    import yaml
    from omegaconf import OmegaConf

    if (number := _number(text)) is not None or not text:
        return number
    try:
        spaced = re.sub(r"([{,]\s*[\w.-]+):(?=\S)", r"\1: ", text)
        return OmegaConf.to_container(OmegaConf.create(f"- {spaced}"))[0]  # type: ignore[index] # it is a list
    except yaml.YAMLError as error:
        raise UserError(f"cannot read '{text}': {getattr(error, 'problem', None) or error}") from None


def _items(text: str) -> list[str]:
    """Split at commas outside quotation marks and brackets."""
    parts, depth, quote = [""], 0, ""
    for char in text:
        if char == "," and not quote and depth <= 0:
            parts.append("")
            continue
        if char == quote or (char in "'\"" and not quote and not parts[-1].strip()):
            quote = "" if quote else char
        elif not quote:
            depth += (char in "[{(") - (char in ")}]")
        parts[-1] += char
    return [part.strip() for part in parts]


class Asked(NamedTuple):
    """How a finished run is to be evaluated; None: that was not given."""

    settings: EvaluationConfig
    device: str | None = None
    threads: int | None = None  # of the CPU


def apply(config: Config, words: list[str]) -> Asked:
    """Apply overrides to a run's evaluation settings. Raises UserError for what does not fit it.

    New lengths are scored on targets that the run's own lengths allow too, so that all rows are paired.
    """
    plain, given = schema.to_container(config), pairs(words)
    for key, text in given.items():
        if key not in {WORDS[word] for word in OF_A_FINISHED_RUN}:
            raise suggest.unknown_key(key, OF_A_FINISHED_RUN)
        section, _, name = key.partition(".")
        plain[section][name] = value(key, text)
    if LENGTH in given:
        plain["evaluation"]["ratios"] = ratios(plain["evaluation"].pop("length"), config)
    if plain["evaluation"]["longest"] is None:
        plain["evaluation"]["longest"] = max(1.0, config.evaluation.ratios[-1])
    new = schema.validate(type(config), plain)
    typed = {name: getattr(new.runtime, name) for name in ("device", "threads") if f"runtime.{name}" in given}
    return Asked(new.evaluation, **typed)


def ratios(lengths: list[Any], config: Config) -> list[float]:
    """Return lengths in tokens as multiples of the training length, ascending; UserError for other values."""
    if config.data.task is not None:
        raise UserError(f"length is in tokens of text: for '{config.data.name}' give ratio=2,4, in trained problems")
    if not lengths or not all(type(length) is int and length >= 1 for length in lengths):
        raise UserError(f"length is {','.join(map(str, lengths))}: expected lengths in tokens, such as 128,256")
    return [length / config.training.train_length for length in sorted(set(lengths))]
