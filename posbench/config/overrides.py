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
from posbench.errors import UserError, did_you_mean

logger = logging.getLogger(__name__)
LENGTH, RATIOS = "evaluation.length", "evaluation.ratios"  # the first is no key: it sets the second
KEYS = schema.keys()
FILES = ("data.path", "data.dataset", "data.tokenizer", "start")  # keys whose values may be files, of whatever name
OF_A_SWEEP = ("sweep", "tune", "tune_grid")  # what `posbench sweep` takes beside what its runs take
SECTIONS = {"evaluation": EvaluationConfig, "runtime": RuntimeConfig}
# What may be typed without its section, and the key it stands for.
WORDS = {field.name: f"{name}.{field.name}" for name, cls in SECTIONS.items() for field in dataclasses.fields(cls)}
WORDS |= {word: f"evaluation.{word}s" for word in ("protocol", "ratio", "extension", "task")}
WORDS |= {"length": LENGTH, "lengths": LENGTH}
# What `posbench evaluate` takes: what is measured on the way through training is none of it.
OF_A_FINISHED_RUN = [word for word, key in WORDS.items() if key.startswith("evaluation.") and word != "at_tokens"]
OF_A_FINISHED_RUN += ["device", "threads", "processes"]


def split(word: str, example: str = "") -> tuple[str, str]:
    """The full key of an override and its value as it was typed. Raises UserError if it is no key=value."""
    key, equals, text = word.partition("=")
    if key.startswith(("+", "~")) and equals:
        raise UserError(f"unknown key '{key}': keys have no sign here, {word.lstrip('+~')}")
    if not key or not equals:
        expected = f": expected key=value, such as {example}" if example else suggest.for_word(word)
        raise UserError(f"cannot read '{word}'{expected}")
    section, _, name = key.rpartition(".")
    return WORDS.get(name, key) if section in ("", *SECTIONS) else key, text


def start_of(words: Collection[str]) -> str:
    """What training is to begin from: the value of `start`, empty if it is not given."""
    return next((word.partition("=")[2] for word in words if word.startswith("start=")), "")


def pairs(words: Collection[str], example: str = "") -> dict[str, str]:
    """Typed values by full key. Of a key that is given twice the later value holds, and a line says so."""
    given: dict[str, str] = {}
    for key, text in (split(word, example) for word in words):
        for other in (LENGTH, RATIOS) if key in (LENGTH, RATIOS) else (key,):  # those two set the same
            if other in given:
                logger.warning("%s=%s is followed by %s=%s, which holds", other, given.pop(other), key, text)
        given[key] = text
    return given


def values(key: str, text: str, names: Collection[str] = ()) -> list[str]:
    """The values that one override gives a sweep: those of `a,b`, `range(0,5)` or `glob(*)` over names, else the one.

    Evaluation makes no other run, so its lists are one value.
    """
    if key.startswith("evaluation.") or (key in FILES and is_there(text)):
        return [text]
    if match := re.fullmatch(r"range\((-?\d+),(-?\d+)\)", text):
        every = [str(number) for number in range(int(match[1]), int(match[2]))]
    elif (match := re.fullmatch(r"glob\((.+)\)", text)) and names:
        every = [name for name in fnmatch.filter(names, match[1]) if name.count("/") == match[1].count("/")]
    else:
        every = _items(text)
        if schema.kind(KEYS.get(key)).endswith("s") and not all(each.startswith("[") for each in every):
            return [text]
    if not every:
        raise UserError(f"{key}={text} matches nothing")
    return every


def value(key: str, text: str) -> Any:
    """The value of a full key as it was typed: an existing file's name stands as it is, whatever is in it."""
    kind = "ints" if key == LENGTH else schema.kind(KEYS.get(key))
    if (key in FILES and is_there(text)) or (kind.endswith("s") and "${" in text):
        return text
    if kind.endswith("s"):
        inner = text.strip().removeprefix("[").removesuffix("]")
        return [_one(key, kind[:-1], item) for item in _items(inner) if item]
    return _one(key, kind, text)


def _one(key: str, kind: str, text: str) -> Any:
    if kind == "text":
        quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
        return None if text == "null" else text[1:-1] if quoted else text
    if kind != "yaml" and _number(text) is None and "${" not in text and text != "null":
        raise suggest.invalid({"loc": (key,), "type": kind, "input": text}, KEYS)
    return read(text)


def _number(text: str) -> int | float | None:
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(text)
    return None


def read(text: str) -> Any:
    """A value without a type, such as an option of an encoding: a number, or YAML, where `{a:1}` needs no blank."""
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


# -- a finished run ----------------------------------------------------------------------------------------------------


class Asked(NamedTuple):
    """How a finished run is to be evaluated; None: that was not given."""

    settings: EvaluationConfig
    device: str | None = None
    threads: int | None = None  # of the CPU
    processes: int | None = None


def apply(config: Config, words: list[str]) -> Asked:
    """Apply overrides to a run's evaluation settings. Raises UserError for what does not fit it.

    New lengths are scored on targets that the run's own lengths allow too, so that all rows are paired.
    """
    given = pairs(words, "length=128,256")
    for key in given.keys() - {WORDS[word] for word in OF_A_FINISHED_RUN}:
        near = did_you_mean(key.rpartition(".")[2], OF_A_FINISHED_RUN, suggest.SIMILAR)
        near = near or f" (evaluate takes {', '.join(OF_A_FINISHED_RUN)})"
        raise UserError(f"unknown key '{key}'{near}")
    typed = {key: value(key, text) for key, text in given.items()}
    if LENGTH in typed:
        typed[RATIOS] = ratios(typed.pop(LENGTH), config)
    made: dict[str, Any] = {}
    for name, cls in SECTIONS.items():
        own = {key.partition(".")[2]: item for key, item in typed.items() if key.startswith(f"{name}.")}
        made[name] = schema.validate(cls, dataclasses.asdict(getattr(config, name)) | own, name)
    settings = made["evaluation"]
    if settings.longest is None:
        settings = dataclasses.replace(settings, longest=max(1.0, config.evaluation.ratios[-1]))
    dataclasses.replace(config, evaluation=settings)  # checks it against the training length
    names = ("device", "threads", "processes")
    return Asked(settings, *(getattr(made["runtime"], name) if f"runtime.{name}" in given else None for name in names))


def ratios(lengths: list[Any], config: Config) -> tuple[float, ...]:
    """Lengths in tokens as multiples of the training length, each once, ascending; UserError for other values."""
    train_length = config.training.train_length
    if config.data.task is not None:
        raise UserError(f"length is in tokens of text: for '{config.data.name}' give ratio=2,4, in trained problems")
    if not lengths or not all(type(length) is int and length >= 1 for length in lengths):
        example = f"{train_length // 2},{2 * train_length}"
        raise UserError(f"length is {','.join(map(str, lengths))}: expected lengths in tokens, such as {example}")
    return tuple(length / train_length for length in sorted(set(lengths)))
