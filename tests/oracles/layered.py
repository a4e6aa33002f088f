"""Each layer by the oracle of the encoding it uses, under that layer's window."""

import dataclasses

from oracles import _attention, _inner

CASES = [
    {},
    {"layers": [{"name": "rope", "window": 5}, {"name": "none"}, {"name": "rope", "base": 500.0}]},
    {"layers": [{"name": "alibi", "window": 7}, {"name": "t5", "num_buckets": 8, "max_distance": 20}]},
    {"layers": [{"name": "rope", "chunk": 5}, {"name": "alibi", "chunk": 3}, {"name": "none"}]},
    {"layers": [{"name": "none", "window": 3}, {"name": "alibi"}, {"name": "none", "window": 1}]},
]
TOLERANCE = {"atol": 1e-4, "rtol": 1e-5}  # rope's, by transformers' fp32 angles


def parameter_count(shape, options):
    entries = entries_of(shape, options)
    distinct = [entry for i, entry in enumerate(entries) if entry not in entries[:i]]
    return sum(
        _inner.parameter_count(dataclasses.replace(shape, n_layers=entries.count(entry)), inside(entry))
        for entry in distinct
    )


def entries_of(shape, options):
    """What each layer uses."""
    return [options["layers"][i % len(options["layers"])] for i in range(shape.n_layers)]


def inside(entry):
    """An entry as the options of a wrapper around its encoding."""
    given = {key: value for key, value in entry.items() if key not in ("name", "window", "chunk")}
    return {"inner": entry["name"], "inner_options": given}


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    entries = entries_of(shape, options)
    distinct = [entry for i, entry in enumerate(entries) if entry not in entries[:i]]
    entry = entries[layer]
    narrow, before = dataclasses.replace(shape, n_layers=entries.count(entry)), entries[:layer].count(entry)
    given = (q, k, v, x, positions, before, causal)
    found = _inner.found(parameters, narrow, inside(entry), *given, at=distinct.index(entry))
    return {"output": _attention.output_of(found, q, k, v, causal, entry.get("window"), entry.get("chunk"))}
