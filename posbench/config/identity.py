"""The identity of a run: its id does not change when posbench gains a key, and a path
has one spelling.

Adding a key must neither rename nor orphan a run that has a folder. So every later key
has a value that means what posbench did without it: ids leave the key out at that
value, and a file without the key is read as if it had that value. The value belongs to
the past: a new default in the YAML changes nothing here.
"""

import copy
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posbench import encodings

# the name of a folder that `--restart` put beside the new run's
MOVED_ASIDE = re.compile(r".+\.old-\d+")
# sections that do not change a run's id
NOT_IDENTITY = ("study", "tracking", "evaluation", "runtime")
# Later keys of sections, with their former values. These are also the defaults of the
# sections' dataclasses.
LATER: dict[str, dict[str, Any]] = {
    "model": {"n_kv_heads": None, "qk_norm": False},
    # no field any more; kept rows have it in their settings
    "training": {"lengths": []},
}
LATER |= {
    "data": {"task": None, "offset": 0, "test_pieces": None, "document_mask": False}
}
_ALIKE: dict[str, dict[str, Any]] = {
    "abacus": {"others": "random"},
    "t5": {"rate": 1.0},
}
_ALIKE |= {name: {"per_layer": False} for name in ("dape", "dape_v2")}
_START, _NO_INNER = {"start": "torch"}, {"inner": "none", "inner_options": {}}
LATER_OPTIONS = _ALIKE | {
    "path": _START,
    "path_fox": _START,
    "selective_rope": _START,
    "liere": {"block": None},
}
LATER_OPTIONS |= {"canon": _NO_INNER, "cca": _NO_INNER}
LATER_OPTIONS |= {
    "randomized": {"continuous": False},
    "rope": {"frequencies": "geometric"},
}
# Former defaults of encodings inside others, whose files hold only the options that
# were given. Today's defaults differ, so the same file would mean another run. New
# configurations therefore write these options out.
FORMER = _ALIKE | dict.fromkeys(("path", "path_fox"), _START | {"silu": False})
FORMER |= {"selective_rope": _START | {"rank": 16}, "fire": {"threshold": None}}


def digest(shaping: Mapping[str, Any]) -> str:
    """Return the 8 hex digits at the end of an id: a digest of all settings that the
    results depend on.
    """
    return hashlib.sha256(
        json.dumps(shaping, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()[:8]


def one_number(value: Any) -> Any:
    """Return 10000.0 as 10000, at any depth, so that `encoding.base=1e4` and
    `encoding.base=10000` are one run.
    """
    if isinstance(value, dict):
        return {key: one_number(item) for key, item in value.items()}
    if isinstance(value, list):
        return [one_number(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def add_later_keys(container: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with missing later options of encodings at former values;
    dataclasses add other keys.
    """
    config = copy.deepcopy(dict(container))
    for _, options, key, value in _later_options(
        config.get("encoding"), later=LATER_OPTIONS
    ):
        options.setdefault(key, copy.deepcopy(value))
    return config


def drop_later_keys(container: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that an id is made from. Later keys are left out at values
    that mean the former behaviour.
    """
    shaping = {
        key: copy.deepcopy(value)
        for key, value in container.items()
        if key not in NOT_IDENTITY
    }
    later = [
        (section, shaping.get(section), *option)
        for section, keys in LATER.items()
        for option in keys.items()
    ]
    later += [
        *_later_options(shaping.get("encoding"), later=LATER_OPTIONS),
        ("", shaping, "start", None),
    ]
    for _, options, key, value in later:
        if isinstance(options, dict) and options.get(key, ...) == value:
            del options[key]
    return shaping


def spell_defaults(container: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration. Inner encodings get their missing options of `FORMER`,
    at today's defaults.
    """
    for name, options, key, _ in _later_options(container.get("encoding"), later={}):
        options.setdefault(key, copy.deepcopy(encodings.options_of(name)[key]))
    return container


def _later_options(
    options: Any, name: Any = None, later: Mapping[str, Any] = FORMER
) -> Iterator[tuple[Any, ...]]:
    """Yield name, options, later key and former value: for encodings inside one, at any
    depth, then for that one.
    """
    if isinstance(options, dict) and isinstance(
        name := name or options.get("name"), str
    ):
        for layer in options.get("layers") or ():
            yield from _later_options(layer)
        yield from _later_options(options.get("inner_options"), options.get("inner"))
        yield from ((name, options, *option) for option in later.get(name, {}).items())


def with_paths(plain: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with `~` expanded, and each path to a text spelt in one
    way: one file is one run.
    """
    data, runtime = plain["data"], plain["runtime"]
    for key in ("path", "tokenizer"):
        path = data[key]
        # a tokenizer may be a name
        if path and (key == "path" or os.path.exists(os.path.expanduser(path))):
            data[key] = relative_path(path)
    homes = {
        key: os.path.expanduser(runtime[key])
        for key in ("outputs", "cache")
        if runtime[key]
    }
    return plain | {"runtime": runtime | homes}


def relative_path(path: str) -> str:
    """Return a path relative to the current folder, which is known by its real name or
    by $PWD; absolute if outside.
    """
    absolute = Path(os.path.abspath(os.path.expanduser(path)))
    for folder in (Path.cwd(), Path(os.environ.get("PWD") or "/")):
        if absolute.is_relative_to(folder) and os.path.samefile(folder, "."):
            return absolute.relative_to(folder).as_posix()
    return str(absolute)
