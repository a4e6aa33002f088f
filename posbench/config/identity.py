"""What makes a run the same run: ids that survive new keys, older files, and one spelling of each path.

Adding a key must neither rename nor orphan a run that has a folder. So every later key has a value that means what
posbench did without it: ids leave the key out at that value, and a file without the key is read as if it held it.
That value belongs to the past: a new default in the YAML changes nothing here.
"""

import copy
import dataclasses
import glob
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posbench import encodings
from posbench.errors import UserError

NOT_IDENTITY = ("study", "tracking", "evaluation", "runtime")  # sections that make no other run
# "section.key" beside the options of encodings; their dataclasses have the same values as defaults.
LATER: dict[str, Any] = {"data.task": None, "data.offset": 0, "data.test_pieces": None, "start": None}
LATER |= {"model.n_kv_heads": None, "model.qk_norm": False}
# "encoding.option", of an encoding and of one inside another.
_BOTH: dict[str, Any] = {
    "abacus.others": "random", "path.start": "torch", "path_fox.start": "torch", "dape.per_layer": False,
    "dape_v2.per_layer": False, "selective_rope.start": "torch", "t5.rate": 1.0,
}  # fmt: skip
LATER_OPTIONS = _BOTH | {
    "canon.inner": "none", "canon.inner_options": {}, "cca.inner": "none", "cca.inner_options": {}, "liere.block": None,
}  # fmt: skip
# Of encodings inside others, whose files name only the options that were given. As a default of today differs, the
# same text would mean another run; so new configurations write it out.
FORMER = _BOTH | {"path.silu": False, "path_fox.silu": False, "selective_rope.rank": 16, "fire.threshold": None}


def digest(shaping: Mapping[str, Any]) -> str:
    """The 8 hex digits at the end of an id, of all that numbers follow from."""
    text = json.dumps(shaping, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def one_number(value: Any) -> Any:
    """10000 and 10000.0 are one value, so that `encoding.base=1e4` is the run that `encoding.base=10000` is."""
    if isinstance(value, dict):
        return {key: one_number(item) for key, item in value.items()}
    if isinstance(value, list):
        return [one_number(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def moved_aside(name: str) -> bool:
    """Whether a folder has the name that `--restart` gives to an earlier run: `<run>.old-1`."""
    return re.fullmatch(r".+\.old-\d+", name) is not None


# -- older files -------------------------------------------------------------------------------------------------------


def completed(container: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with later keys at their former values."""
    whole = copy.deepcopy(dict(container))
    for holder, key, value in _later(whole):
        holder.setdefault(key, copy.deepcopy(value))
    return whole


def without_neutral(container: Mapping[str, Any]) -> dict[str, Any]:
    """What makes a run, without the later keys that mean what was done before them."""
    rest = {key: copy.deepcopy(value) for key, value in container.items() if key not in NOT_IDENTITY}
    for holder, key, value in _later(rest):
        if holder.get(key, ...) == value:
            del holder[key]
    return rest


def written_out(container: dict[str, Any]) -> dict[str, Any]:
    """A new configuration, in which inner encodings name their options in `FORMER`, at today's defaults."""
    for name, options in _inner(container.get("encoding")):
        defaults = encodings.options_of(name)
        options |= {key: copy.deepcopy(defaults[key]) for key in _options_of(name, FORMER).keys() - options.keys()}
    return container


def _later(config: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Each later key that a configuration can have: the dictionary that holds it, its name there, its former value.

    Inner encodings come first: a wrapper's `inner_options` are empty without their former values.
    """
    encoding = config.get("encoding")
    for name, options in _inner(encoding):
        yield from ((options, option, value) for option, value in _options_of(name, FORMER).items())
    if isinstance(encoding, dict):
        later = _options_of(str(encoding.get("name")), LATER_OPTIONS)
        yield from ((encoding, option, value) for option, value in later.items())
    for key, value in LATER.items():
        section, _, name = key.rpartition(".")
        holder = config.get(section) if section else config
        if isinstance(holder, dict) and (section != "model" or "mlp" in holder):  # not a model from elsewhere
            yield holder, name, value


def _inner(encoding: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and options of each encoding inside another, at any depth."""
    if not isinstance(encoding, dict):
        return
    layers = encoding["layers"] if isinstance(encoding.get("layers"), list) else []
    pairs = [(encoding.get("inner"), encoding.get("inner_options"))]
    for name, options in [*pairs, *((entry.get("name"), entry) for entry in layers if isinstance(entry, dict))]:
        if isinstance(name, str) and isinstance(options, dict):
            yield name, options
            yield from _inner(options)


def _options_of(name: str, table: Mapping[str, Any]) -> dict[str, Any]:
    return {key.removeprefix(f"{name}."): value for key, value in table.items() if key.startswith(f"{name}.")}


# -- paths -------------------------------------------------------------------------------------------------------------


def with_paths(config: Any) -> Any:
    """A `Config` with `~` expanded, and each path to text or a tokenizer spelt in one way: one file, one run.

    A path below the current folder becomes relative to it, any other absolute.
    """
    data, runtime = config.data, config.runtime
    names = {key: getattr(data, key) for key in ("dataset", "tokenizer")}  # also names on the hub, or bpe
    found: dict[str, Any] = {key: spelt(name) for key, name in names.items() if name and os.path.exists(expanded(name))}
    data = dataclasses.replace(data, path=data.path and spelt(data.path), **found)
    cache = runtime.cache and expanded(runtime.cache)
    runtime = dataclasses.replace(runtime, outputs=expanded(runtime.outputs), cache=cache)
    return dataclasses.replace(config, data=data, runtime=runtime)


def expanded(path: str) -> str:
    """A path with `~` as the home folder. Raises UserError for an unknown user."""
    home = os.path.expanduser(path)
    if home.startswith("~") and not os.path.exists(home):
        raise UserError(f"'{path}': there is no user {path.partition('/')[0].lstrip('~')!r}; a file is ./{path}")
    return home


def is_there(path: str) -> bool:
    """Whether there is such a file, folder or glob."""
    path = expanded(path)
    return os.path.exists(path) or any(glob.iglob(path, recursive=True))


def spelt(path: str) -> str:
    """Relative to the current folder, by its real name or the one that the shell has for it; absolute outside of it."""
    absolute = Path(os.path.abspath(expanded(path)))
    for folder in (Path.cwd(), Path(os.environ.get("PWD") or "/")):
        if absolute.is_relative_to(folder) and os.path.samefile(folder, "."):
            return absolute.relative_to(folder).as_posix()
    return str(absolute)
