"""What makes a run the same run: ids that survive new keys, older files, and one spelling of each path.

Adding a key must neither rename nor orphan a run that has a folder. So every later key has a value that means what
posbench did without it: ids leave the key out at that value, and a file without the key is read as if it held it.
That value belongs to the past: a new default in the YAML changes nothing here.
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
from posbench.errors import UserError

MOVED_ASIDE = re.compile(r".+\.old-\d+")  # the name of a folder that `--restart` put beside the new run's
NOT_IDENTITY = ("study", "tracking", "evaluation", "runtime")  # sections that make no other run
# Beside the options of encodings; their dataclasses have the same values as defaults.
LATER: dict[str, dict[str, Any]] = {
    "data": {"task": None, "offset": 0, "test_pieces": None, "document_mask": False},
    "model": {"n_kv_heads": None, "qk_norm": False}, "training": {"lengths": []},
}  # fmt: skip
_ALIKE: dict[str, dict[str, Any]] = {
    "abacus": {"others": "random"}, "dape": {"per_layer": False}, "dape_v2": {"per_layer": False}, "t5": {"rate": 1.0},
}  # fmt: skip
_START, _NO_INNER = {"start": "torch"}, {"inner": "none", "inner_options": {}}
LATER_OPTIONS = _ALIKE | {"path": _START, "path_fox": _START, "selective_rope": _START, "liere": {"block": None}}
LATER_OPTIONS |= {"canon": _NO_INNER, "cca": _NO_INNER}
LATER_OPTIONS |= {"randomized": {"continuous": False}, "rope": {"frequencies": "geometric"}}
# Of encodings inside others, whose files name only the options that were given. As a default of today differs, the
# same text would mean another run; so new configurations write it out.
FORMER = _ALIKE | dict.fromkeys(("path", "path_fox"), _START | {"silu": False})
FORMER |= {"selective_rope": _START | {"rank": 16}, "fire": {"threshold": None}}


def digest(shaping: Mapping[str, Any]) -> str:
    """Return the 8 hex digits at the end of an id, of all that numbers follow from."""
    return hashlib.sha256(json.dumps(shaping, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:8]


def one_number(value: Any) -> Any:
    """Return 10000.0 as 10000, at any depth, so that `encoding.base=1e4` is the run that `encoding.base=10000` is."""
    if isinstance(value, dict):
        return {key: one_number(item) for key, item in value.items()}
    if isinstance(value, list):
        return [one_number(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def add_later_keys(container: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with later options of encodings at their former values; dataclasses have the others."""
    whole = copy.deepcopy(dict(container))
    for options, key, value in _later_options(whole.get("encoding")):
        options.setdefault(key, copy.deepcopy(value))
    return whole


def drop_later_keys(container: Mapping[str, Any]) -> dict[str, Any]:
    """Return what makes a run, without the later keys that mean what was done before them."""
    rest = {key: copy.deepcopy(value) for key, value in container.items() if key not in NOT_IDENTITY}
    later = [(rest.get(section), key, value) for section, keys in LATER.items() for key, value in keys.items()]
    for holder, key, value in [*_later_options(rest.get("encoding")), *later, (rest, "start", None)]:
        if isinstance(holder, dict) and holder.get(key, ...) == value:
            del holder[key]
    return rest


def spell_defaults(container: dict[str, Any]) -> dict[str, Any]:
    """Return a new configuration, in which inner encodings name their options in `FORMER`, at today's defaults."""
    for name, options in _inner(container.get("encoding")):
        for option in FORMER.get(name, {}):
            options.setdefault(option, copy.deepcopy(encodings.options_of(name)[option]))
    return container


def _later_options(encoding: Any) -> list[tuple[dict[str, Any], str, Any]]:
    """Return options with a later key, the key and its former value; inner encodings first, so that those may empty."""
    holders = [(options, FORMER.get(name, {})) for name, options in _inner(encoding)]
    holders += [(encoding, LATER_OPTIONS.get(str(encoding.get("name")), {}))] if isinstance(encoding, dict) else []
    return [(options, *later) for options, keys in holders for later in keys.items()]


def _inner(encoding: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and options of each encoding inside another, at any depth."""
    if isinstance(encoding, dict):
        layers = [each for each in encoding.get("layers") or () if isinstance(each, dict)]
        pairs = [(encoding.get("inner"), encoding.get("inner_options")), *((each.get("name"), each) for each in layers)]
        for name, options in pairs:
            if isinstance(name, str) and isinstance(options, dict):
                yield name, options
                yield from _inner(options)


def with_paths(plain: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with `~` expanded, and each path to a text spelt in one way: one file, one run."""
    data, runtime = plain["data"], plain["runtime"]
    for key in ("path", "tokenizer"):
        if isinstance(path := data[key], str) and (key == "path" or os.path.exists(with_home(path))):  # or a name
            data[key] = relative_path(path)
    return plain | {"runtime": runtime | {k: with_home(runtime[k]) for k in ("outputs", "cache") if runtime[k]}}


def with_home(path: str) -> str:
    """Return a path with `~` as the home folder. Raises UserError for an unknown user."""
    if (home := os.path.expanduser(path)).startswith("~") and not os.path.exists(home):
        raise UserError(f"'{path}': there is no user {path.partition('/')[0].lstrip('~')!r}; a file is ./{path}")
    return home


def relative_path(path: str) -> str:
    """Return a path relative to the current folder, by its real name or the shell's for it; absolute outside of it."""
    absolute = Path(os.path.abspath(with_home(path)))
    for folder in (Path.cwd(), Path(os.environ.get("PWD") or "/")):
        if absolute.is_relative_to(folder) and os.path.samefile(folder, "."):
            return absolute.relative_to(folder).as_posix()
    return str(absolute)
