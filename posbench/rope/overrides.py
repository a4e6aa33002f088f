"""Changes of a config.json, as engines take them: `rope_parameters.factor=4`, the JSON
of vLLM and SGLang, the flags of llama.cpp, the keys of a GGUF file.
"""

import copy
import json
import math
import re
from collections.abc import Sequence
from typing import Any

from posbench.errors import UserError, unknown
from posbench.rope.keys import SECTIONS, Settings, refuse_values

# Flags of llama.cpp, and the keys of a section that they set, in this order: a type
# replaces that of a lone factor, and `attn_factor` depends on the factor.
FLAGS = {
    "--rope-scale": "factor",
    "--rope-freq-scale": "1/factor",
    "--rope-scaling": "rope_type",
    "--rope-freq-base": "rope_theta",
    "--yarn-orig-ctx": "original_max_position_embeddings",
    "--yarn-attn-factor": "attn_factor",
    "--yarn-beta-fast": "beta_fast",
    "--yarn-beta-slow": "beta_slow",
}
# flags with a JSON of keys: vLLM's, SGLang's
JSONS = ("--hf-overrides", "--json-model-override-args")
GGUF_FLAG = "--override-kv"  # ARCHITECTURE.KEY=TYPE:VALUE, of llama.cpp
# Keys of a GGUF file after its architecture, and those that they set.
GGUF = {
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.attn_factor": "attn_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_GGUF_KEY = re.compile(r"[\w-]+\.(context_length|block_count|(rope|attention)\..+)")


def joined_words(words: Sequence[str]) -> list[str]:
    """Return command-line words in which a flag and its value are one, as key=value."""
    found = []
    rest = iter(words)
    for word in rest:
        flag, equals, value = word.partition("=")
        if not word.startswith("--"):
            found.append(f"{JSONS[0]}={word}" if word.startswith("{") else word)
            continue
        if flag not in (*FLAGS, *JSONS, GGUF_FLAG):
            raise unknown("flag", flag, (*FLAGS, *JSONS, GGUF_FLAG))
        if not equals:
            value = next(rest, "")
        if not value or (flag == GGUF_FLAG and "=" not in value):
            expected = "ARCHITECTURE.KEY=TYPE:VALUE" if flag == GGUF_FLAG else "a value"
            raise UserError(f"{flag} {value}: expected {expected} after it")
        if flag == GGUF_FLAG:
            found.append(re.sub("=(float|int|str|bool):", "=", value))
        else:
            found.append(f"{flag}={value}")
    return found


def overridden(settings: Settings, words: Sequence[str]) -> dict[str, Any]:
    """Return a config.json with overrides, each a word key=value."""
    changed = copy.deepcopy(dict(settings))
    text = changed.get("text_config") or changed
    named = {}
    for word in words:
        key, _, typed = word.partition("=")
        if key in JSONS:
            _replace(changed, typed)
        elif key in FLAGS:
            named[FLAGS[key]] = _value(typed)
        elif _GGUF_KEY.fullmatch(key):
            _, _, name = key.partition(".")
            if name not in GGUF:
                raise unknown("GGUF key", name, GGUF)
            named[GGUF[name]] = _value(typed)
        else:
            _set_path(changed, text, key.split("."), _value(typed))
    for name in ("max_position_embeddings", *FLAGS.values()):
        if name in named:
            _set(text, name, named[name])
    return changed


def _value(typed: str) -> Any:
    """Return the value of a typed text: JSON, or else the text itself."""
    try:
        return json.loads(typed)
    except ValueError:
        return typed


def _replace(changed: dict[str, Any], typed: str) -> None:
    """Put the keys of a JSON in place of those that are there, as engines do: a section
    is another one as a whole, only a part of a model keeps its other keys.
    """
    given = _value(typed)
    if not isinstance(given, dict):
        raise UserError(
            f"overrides are {typed[:60]}: expected JSON, such as"
            ' \'{"rope_parameters": {"rope_type": "yarn", "factor": 4}}\''
        )
    for key, value in given.items():
        part = changed
        keys = {key: value}
        if key.endswith("_config") and isinstance(value, dict):
            part = changed.setdefault(key, {})
            keys = value
        for name, given_value in keys.items():
            if name in SECTIONS:
                _put_section(part, name, given_value)
            else:
                part[name] = given_value


def _put_section(text: dict[str, Any], name: str, section: Any) -> None:
    """Put a section on RoPE in place of the file's, with its base if it has one."""
    for other in SECTIONS:
        text.pop(other, None)
    if isinstance(section, dict) and "rope_theta" in section:
        text.pop("rope_theta", None)
    text[name] = section


def _set(text: dict[str, Any], name: str, value: Any) -> None:
    """Set a key by its name in transformers, in the section if it belongs there."""
    if name == "max_position_embeddings":
        text[name] = value
        return
    section = _section(text)
    # of several kinds of layers, flags are for those without a window
    section = section.get("full_attention", section)
    if name in ("1/factor", "attn_factor"):  # to compute with
        refuse_values({"rope_scaling": {**section, name: value}})
    if name == "rope_theta":
        place = section if "rope_theta" in section else text
        place[name] = value
        return
    if name == "1/factor":
        name = "factor"
        value = 1 / value
    if name == "attn_factor":  # it multiplies YaRN's own, and this one replaces it
        name = "attention_factor"
        value *= 0.1 * math.log(section.get("factor", 1)) + 1
    if name == "rope_type":
        section.pop("type", None)
        value = {"none": "default"}.get(value, value)
    section[name] = value
    # llama.cpp's type where a file has none
    if name == "factor" and section.get("rope_type", "default") == "default":
        section.setdefault("type", "linear")


def _section(text: dict[str, Any]) -> dict[str, Any]:
    """Return the section on RoPE of a config.json; a new one if it has none."""
    for name in SECTIONS:
        if text.get(name):
            section: dict[str, Any] = text[name]
            return section
    section = text["rope_scaling"] = {}
    return section


def _set_path(
    changed: dict[str, Any], text: dict[str, Any], keys: list[str], value: Any
) -> None:
    """Set a key by its path. The section on RoPE has two names, and stands in the part
    on the language model; its base replaces one beside it.
    """
    *parents, last = keys
    part = changed if keys[0] in changed else text
    if parents[:1] == ["text_config"]:
        part = text
        del parents[0]
    if last in SECTIONS and not parents:
        _put_section(text, last, value)
        return
    if parents and parents[0] in SECTIONS:
        part = _section(text)
        del parents[0]
        if last == "rope_theta" and not parents:
            text.pop(last, None)
    for key in parents:
        part = part.setdefault(key, {})
        if not isinstance(part, dict):
            raise UserError(f"{'.'.join(keys)}: {key} has no keys")
    part[last] = value
