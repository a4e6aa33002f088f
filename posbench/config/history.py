"""What keys mean that a saved configuration lacks, or that no longer exist.

Adding a key to a configuration must neither rename nor orphan a run that already has a folder. So every later key
has a value that means what posbench did without it. A run's identity leaves the key out at that value, and a file
without the key is read as if it held it. The value belongs to the past: a new default in the YAML changes nothing here.

A wrapper's configuration names only the options of its inner encoding that were given. If a default of one changes, the
same text means another run. So `FORMER` holds the default of before. A new configuration writes today's default out.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

# "section.key" beside the options of encodings; their dataclasses have the same values as defaults.
LATER: dict[str, Any] = {"data.task": None, "data.offset": 0, "data.test_pieces": None, "start": None}
# "encoding.option", of an encoding and of one inside another.
_BOTH: dict[str, Any] = {
    "abacus.others": "random", "path.start": "torch", "path_fox.start": "torch", "dape.per_layer": False,
    "dape_v2.per_layer": False, "selective_rope.start": "torch", "t5.rate": 1.0,
}  # fmt: skip
# An encoding's configuration always names all of its options, but for later ones.
LATER_OPTIONS = _BOTH | {
    "canon.inner": "none", "canon.inner_options": {}, "cca.inner": "none", "cca.inner_options": {}, "liere.block": None,
}  # fmt: skip
# Inside another encoding.
FORMER = _BOTH | {"path.silu": False, "path_fox.silu": False, "selective_rope.rank": 16, "fire.threshold": None}
# Keys and entries of lists that made no other run; a saved configuration that has one is read without it.
REMOVED = {
    "evaluation": ("bootstrap", "reference", "stride"),
    "runtime": ("objective",),
    "tracking": ("code", "weights", "group", "system_metrics", "git", "command"),
}
REMOVED_ENTRIES = {
    "protocols": ("per_position", "sliding"),
    "tasks": ("key_tokens", "multi_key", "multi_value", "variable_tracking", "common_words"),
}


def completed(container: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without removed keys, and with the later ones at their former values."""
    whole = copy.deepcopy(dict(container))
    for section, removed in REMOVED.items():
        if isinstance(whole.get(section), dict):
            whole[section] = {key: value for key, value in whole[section].items() if key not in removed}
    asked = whole.get("evaluation")
    for key, entries in REMOVED_ENTRIES.items():
        if isinstance(asked, dict) and isinstance(asked.get(key), list):
            asked[key] = [entry for entry in asked[key] if str(entry).partition(":")[0] not in entries]
    for holder, key, value in _later(whole):
        holder.setdefault(key, copy.deepcopy(value))
    return whole


def written_out(container: Mapping[str, Any], defaults: Callable[[str], Mapping[str, Any]]) -> dict[str, Any]:
    """A new configuration, in which inner encodings name their options in `FORMER`, at today's defaults.

    Args:
        defaults: gives the options of an encoding with their defaults.
    """
    whole = copy.deepcopy(dict(container))
    for name, options in _inner(whole.get("encoding")):
        for option in _options_of(name, FORMER):
            options.setdefault(option, copy.deepcopy(defaults(name)[option]))
    return whole


def without_neutral(container: Mapping[str, Any]) -> dict[str, Any]:
    """The same without the later keys that mean what was done before them."""
    rest = copy.deepcopy(dict(container))
    for holder, key, value in _later(rest):
        if key in holder and holder[key] == value:
            del holder[key]
    return rest


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
        if isinstance(holder, dict):
            yield holder, name, value


def _inner(encoding: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and options of each encoding inside another, at any depth."""
    if not isinstance(encoding, dict):
        return
    layers = encoding.get("layers")
    entries = [entry for entry in layers if isinstance(entry, dict)] if isinstance(layers, list) else []
    pairs = [(encoding.get("inner"), encoding.get("inner_options")), *((entry.get("name"), entry) for entry in entries)]
    for name, options in pairs:
        if isinstance(name, str) and isinstance(options, dict):
            yield name, options
            yield from _inner(options)


def _options_of(name: str, table: Mapping[str, Any]) -> dict[str, Any]:
    return {key.removeprefix(f"{name}."): value for key, value in table.items() if key.startswith(f"{name}.")}
