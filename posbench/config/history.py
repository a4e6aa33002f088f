"""Default values for configuration keys that older runs lack, and keys that no longer exist.

Adding a key to a configuration must neither rename nor orphan a run that already has a folder. So every later key
stands in `ADDED` with its neutral value, the one that means what posbench did without the key. A run's identity leaves
the key out where it has that value, and a saved configuration that lacks it is read as if it held it. The value belongs
to the past: a new default in the YAML changes nothing here.

A wrapper's configuration names only the options of its inner encoding that were given; the rest are defaults. If such a
default changes, the same text means another run. So `FORMER` holds the default of before. A new configuration writes
today's default out; a saved one that lacks the option is read with the former.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

# Options that came later, whose default is not their neutral value: "encoding/<name>.option".
_STARTS: dict[str, Any] = {
    "encoding/abacus.others": "random",
    "encoding/path.start": "torch",
    "encoding/path_fox.start": "torch",
    "encoding/dape.per_layer": False,
    "encoding/dape_v2.per_layer": False,
    "encoding/selective_rope.start": "torch",
    "encoding/t5.rate": 1.0,
}

# "section.key": neutral value. An option of an encoding is written "encoding/<name>.option".
ADDED: dict[str, Any] = {
    **_STARTS,
    "data.task": None,
    "data.offset": 0,
    "data.test_pieces": None,
    "start": None,
    "encoding/canon.inner": "none",
    "encoding/canon.inner_options": {},
    "encoding/cca.inner": "none",
    "encoding/cca.inner_options": {},
    "encoding/liere.block": None,
}

# Options of inner encodings: the default of before. Every configuration of an encoding itself names all its options.
FORMER: dict[str, Any] = {
    **_STARTS,
    "encoding/fire.threshold": None,
    "encoding/path.silu": False,
    "encoding/path_fox.silu": False,
    "encoding/selective_rope.rank": 16,
}

# "section.key" of sections that make no other run; a saved configuration that has one is read without it.
REMOVED = (
    "evaluation.bootstrap",
    "evaluation.reference",
    "runtime.objective",
    "tracking.code",
    "tracking.weights",
)
# "section.key" of lists: the same of entries.
REMOVED_ENTRIES = {
    "evaluation.protocols": ("per_position",),
    "evaluation.tasks": ("key_tokens", "multi_value", "variable_tracking", "common_words"),
}


def completed(container: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as a plain dictionary of today's keys, the later ones that it lacks at their neutral values."""
    whole = copy.deepcopy(dict(container))
    for key in REMOVED:
        name, _, removed = key.partition(".")
        if isinstance(whole.get(name), dict):
            whole[name].pop(removed, None)
    for key, entries in REMOVED_ENTRIES.items():
        name, _, held = key.partition(".")
        if isinstance(whole.get(name), dict) and isinstance(whole[name].get(held), list):
            whole[name][held] = [one for one in whole[name][held] if str(one).partition(":")[0] not in entries]
    for path, neutral in _added(whole):
        section: Any = whole
        for name in path[:-1]:
            section = section.setdefault(name, {}) if isinstance(section, dict) else None
        if isinstance(section, dict):  # what is no section is for the schema to refuse
            section.setdefault(path[-1], copy.deepcopy(neutral))
    for name, options in _inner(whole.get("encoding")):
        for option, former in _former(name).items():
            options.setdefault(option, copy.deepcopy(former))
    return whole


def written_out(container: Mapping[str, Any], defaults: Callable[[str], Mapping[str, Any]]) -> dict[str, Any]:
    """A new configuration, in which inner encodings name their options in `FORMER`, at today's defaults.

    Args:
        defaults: gives the options of an encoding with their defaults.
    """
    whole = copy.deepcopy(dict(container))
    for name, options in _inner(whole.get("encoding")):
        for option in _former(name):
            options.setdefault(option, copy.deepcopy(defaults(name)[option]))
    return whole


def without_neutral(container: Mapping[str, Any]) -> dict[str, Any]:
    """The same without the later keys that have their neutral values, nor sections that then hold nothing."""
    rest = copy.deepcopy(dict(container))
    for name, options in _inner(rest.get("encoding")):
        for option, former in _former(name).items():
            _drop(options, [option], former)
    for path, neutral in _added(rest):
        _drop(rest, path, neutral)
    return rest


def _drop(section: Any, path: list[str], neutral: Any) -> None:
    name, *deeper = path
    if not isinstance(section, dict) or name not in section:
        return
    if deeper:
        held = bool(section[name])
        _drop(section[name], deeper, neutral)
        if held and not section[name]:
            del section[name]
    elif section[name] == neutral:
        del section[name]


def _added(container: Mapping[str, Any]) -> Iterator[tuple[list[str], Any]]:
    """Path and neutral value of the later keys that this configuration can have."""
    encoding = container.get("encoding")
    chosen = f"encoding/{encoding.get('name')}." if isinstance(encoding, Mapping) else "encoding/"
    for key, neutral in ADDED.items():
        if key.startswith(chosen):
            yield ["encoding", *key.removeprefix(chosen).split(".")], neutral
        elif not key.startswith("encoding/"):
            yield key.split("."), neutral


def _inner(encoding: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and options of each encoding inside another, at any depth. The options can be changed in place."""
    if not isinstance(encoding, dict):
        return
    layers = encoding.get("layers")
    entries = [entry for entry in layers if isinstance(entry, dict)] if isinstance(layers, list) else []
    for name, options in [
        (encoding.get("inner"), encoding.get("inner_options")),
        *((entry.get("name"), entry) for entry in entries),
    ]:
        if isinstance(name, str) and isinstance(options, dict):
            yield name, options
            yield from _inner(options)


def _former(name: str) -> dict[str, Any]:
    """The former defaults of an encoding's options."""
    start = f"encoding/{name}."
    return {key.removeprefix(start): value for key, value in FORMER.items() if key.startswith(start)}
