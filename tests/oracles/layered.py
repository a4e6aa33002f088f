"""Each layer by the oracle of the encoding it uses, under that layer's window."""

import dataclasses
import importlib

from oracles._attention import output_of

_ROPE = {"base": 10000.0, "layout": "interleaved"}
_DEFAULTS = {"rope": _ROPE, "alibi": {"slopes": None}, "t5": {"num_buckets": 32, "max_distance": 128}, "none": {}}
CASES = [
    {},
    {"layers": [{"name": "rope", "window": 5}, {"name": "none"}, {"name": "rope", "base": 500.0}]},
    {"layers": [{"name": "alibi", "window": 7}, {"name": "t5", "num_buckets": 8, "max_distance": 20}]},
    {"layers": [{"name": "none", "window": 3}, {"name": "alibi"}, {"name": "none", "window": 1}]},
]
TOLERANCE = {"atol": 1e-4, "rtol": 1e-5}  # rope's, by transformers' fp32 angles


def parameter_count(shape, options):
    entries = entries_of(shape, options)
    distinct = [entry for i, entry in enumerate(entries) if entry not in entries[:i]]
    return sum(count(dataclasses.replace(shape, n_layers=entries.count(entry)), entry) for entry in distinct)


def count(shape, entry):
    learned = getattr(importlib.import_module(f"oracles.{entry['name']}"), "parameter_count", None)
    return learned(shape, options_of(entry)) if learned else 0


def entries_of(shape, options):
    """What each layer uses."""
    return [options["layers"][i % len(options["layers"])] for i in range(shape.n_layers)]


def options_of(entry):
    given = {key: value for key, value in entry.items() if key not in ("name", "window")}
    return _DEFAULTS[entry["name"]] | given


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    entries = entries_of(shape, options)
    distinct = [entry for i, entry in enumerate(entries) if entry not in entries[:i]]
    prefix = f"inners.{distinct.index(entries[layer])}."
    own = {key.removeprefix(prefix): value for key, value in parameters.items() if key.startswith(prefix)}
    inner = importlib.import_module(f"oracles.{entries[layer]['name']}")
    narrow = dataclasses.replace(shape, n_layers=entries.count(entries[layer]))
    before = entries[:layer].count(entries[layer])
    found = inner.reference(own, narrow, options_of(entries[layer]), q, k, v, x, positions, before, causal)
    return {"output": output_of(found, q, k, v, causal, entries[layer].get("window"))}
