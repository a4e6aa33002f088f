"""The keys of a config.json that say what its positions do: the values that they can
have, and changes of them.
"""

import copy
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from posbench.errors import UserError, did_you_mean

Settings = Mapping[str, Any]  # the content of a config.json
Path_ = tuple[str, ...]  # of a key: its parts, then its name
SECTIONS = ("rope_scaling", "rope_parameters")
KNOWN = (
    "rope_theta",
    "rope_type",
    "type",
    "factor",
    "original_max_position_embeddings",
    "max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "short_factor",
    "long_factor",
    "short_mscale",
    "long_mscale",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "alpha",
    "partial_rotary_factor",
    "mrope_section",
    "mrope_interleaved",
    "llama_4_scaling_beta",
)

# Keys outside the sections. Most say a number or a kind of each layer.
_POSITIONS = re.compile(
    "rope|rotary|theta|yarn|ntk|position_emb|window|sliding|swa|chunk_size"
    "|dual_chunk|layer_types|layers_block|layer_pattern|temperature_tuning|attn_scale"
    "|floor_scale|compress_r|global_attn|local_attention|(?<!v_)head_dim"
)
_PARTS = re.compile("text|thinker|language|decoder|llm")  # others: vision, audio, ...
_LIST = re.compile("short_factor|long_factor|section|rope_layers|layer_rope")
_COUNT = re.compile(
    "(max_position_embeddings|^sliding_window|window_size|chunk_size|(rotary|head)_dim)$"
)
_ABOVE_0 = re.compile("theta|base_freq|emb_base|factor|beta_(fast|slow)|alpha|_pct")
_FLAG = re.compile("truncate|interleave")
_NUMBER = re.compile("mscale|scaling_beta|attn_scale|floor_scale")
# former names of types
_FORMER = {"mrope": "default", "su": "longrope"}
# What only tokens of images and video read: in a text their positions are all equal.
OF_IMAGES = re.compile("mrope|section")


def language_part(settings: Settings) -> Settings:
    """Return the part of a config.json on the language model: a section if the model
    has several parts, else all.
    """
    part: Settings = settings.get("text_config") or settings
    if not isinstance(part, Mapping):
        raise UserError(f"text_config is {part}: expected keys and values")
    return part


def rope_sections(text: Settings) -> Iterator[tuple[str, Settings]]:
    """Yield each section on RoPE, or its parts by kind of layer, with its path."""
    for name in SECTIONS:
        section = text.get(name) or {}
        is_nested = False
        for kind, part in section.items():
            if isinstance(part, Mapping):
                is_nested = True
                yield f"{name}.{kind}", part
        if section and not is_nested:
            yield name, section


def of_positions(
    settings: Settings, parents: Path_ = ()
) -> Iterator[tuple[Path_, Any]]:
    """Yield the path and the value of each key on positions."""
    is_section = bool(parents) and not _PARTS.search(parents[-1])
    for key, value in settings.items():
        path = (*parents, key)
        is_of_positions = is_section or _POSITIONS.search(key) or key in SECTIONS
        if isinstance(value, Mapping) and key not in KNOWN:
            if is_of_positions or _PARTS.search(key):
                yield from of_positions(value, path)
        elif is_of_positions and value not in (None, []):
            yield path, value


def refuse_values(settings: Settings) -> None:
    """Raise UserError for a value that no model can have, and for two answers to one
    question.
    """
    text = language_part(settings)
    n_layers = text.get("num_hidden_layers") or math.inf
    for path, value in of_positions(settings):
        values = [value]
        if isinstance(value, list) and len(value) >= n_layers:
            values = value  # by layer, as Step's bases
        for each in values:
            expected = _expected(path[-1], each)
            if expected:
                key = ".".join(path)
                shown = json.dumps(value)[:60]
                if isinstance(value, str):
                    shown = f"'{value}'"
                raise UserError(f"{key} is {shown}: expected {expected}")
    types = _answers(text, ("rope_type", "type"))
    bases = _answers(text, ("rope_theta",))
    if bases and _is_number(text.get("rope_theta")):
        bases["rope_theta"] = text["rope_theta"]
    for what, answers in (("type", types), ("base", bases)):
        if len({*answers.values()}) > 1:
            said = " and ".join(f"{key} {value}" for key, value in answers.items())
            raise UserError(f"two answers, {said}: expected one {what}")


def _expected(name: str, value: Any) -> str:
    """Return what a key wants, where it has another value; else an empty text."""
    if name in SECTIONS:
        return "keys and values, such as rope_type and factor"
    if name in ("rope_type", "type"):
        return "" if isinstance(value, str) else "a name, such as yarn"
    if _FLAG.search(name):
        return "" if isinstance(value, bool) else "true or false"
    if _LIST.search(name):
        numbers = value if isinstance(value, list) else [value]
        if not all(_is_number(number) for number in numbers):
            return "numbers that are not negative"
        is_right = all(numbers) or "factor" not in name
        return "" if is_right else "numbers above 0"
    if _NUMBER.search(name):
        return "" if _is_number(value) else "a number, 0 or above"
    if _COUNT.search(name):
        # Some files have -1 for no window; a list is by layer
        is_count = _is_number(value) and value == int(value)
        if "position" in name:
            return "" if is_count and value else "a whole number above 0"
        is_right = is_count or value == -1 or isinstance(value, list)
        return "" if is_right else "a whole number"
    if _ABOVE_0.search(name):
        may_be_0 = "partial" in name or name.endswith("pct")
        is_right = _is_number(value) and (value > 0 or may_be_0)
        return "" if is_right else "a number above 0"
    return ""


def _answers(text: Settings, names: Sequence[str]) -> dict[str, Any]:
    """Return what the sections that hold for all layers say under some names."""
    answers = {}
    for path, part in rope_sections(text):
        for name in names:
            if path in SECTIONS and part.get(name) is not None:
                value = part[name]
                answers[f"{path}.{name}"] = _FORMER.get(str(value), value)
    return answers


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value < math.inf


def misspelt(settings: Settings) -> list[str]:
    """Return a line for each key of a section that no engine has."""
    lines = []
    for path, part in rope_sections(language_part(settings)):
        for key in part:
            if key not in KNOWN and not OF_IMAGES.search(key):
                near = did_you_mean(key, KNOWN)
                lines.append(f"{path}.{key} is not read{near}")
    return lines


def with_value(settings: Settings, path: Path_, value: Any) -> dict[str, Any]:
    """Return a copy of a config.json with another value."""
    changed = copy.deepcopy(dict(settings))
    part = changed
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return changed


def changes(value: Any) -> list[Any]:
    """Return other values of a key: a number is changed by a tenth, then by more, since
    YaRN rounds and clamps; a flag is turned; a list is changed or shifted; a name
    becomes one that nothing has.
    """
    if isinstance(value, str):
        return [f"{value}?"]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        tenth = max(1, round(value / 10))
        return [value + tenth, 2 * value, value // 2, 10 * value, value // 10]
    if isinstance(value, float):
        return [1.1 * value, 2 * value, value / 2, 10 * value, value / 10]
    if isinstance(value, list) and value:
        if len({*map(str, value)}) > 1 and not isinstance(value[0], float):
            return [[*value[1:], value[0]]]
        if isinstance(value[0], str):
            others = ["sliding_attention", "full_attention"]
            return [[other, *value[1:]] for other in others if other != value[0]]
        if isinstance(value[0], int) and value[0] in (0, 1):
            return [[1 - value[0], *value[1:]]]
        if isinstance(value[0], int | float):
            return [[1.1 * number for number in value]]
    return []
