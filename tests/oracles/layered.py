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


def PARAMETERS(shape):
    return 0


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    entries = [options["layers"][i % len(options["layers"])] for i in range(shape.n_layers)]
    distinct = [entry for i, entry in enumerate(entries) if entry not in entries[:i]]
    prefix = f"inners.{distinct.index(entries[layer])}."
    own = {key.removeprefix(prefix): value for key, value in parameters.items() if key.startswith(prefix)}
    name, window = entries[layer]["name"], entries[layer].get("window")
    inner = importlib.import_module(f"oracles.{name}")
    narrow = dataclasses.replace(shape, n_layers=entries.count(entries[layer]))
    given = _DEFAULTS[name] | {key: value for key, value in entries[layer].items() if key not in ("name", "window")}
    before = entries[:layer].count(entries[layer])
    found = inner.reference(own, narrow, given, q, k, v, x, positions, before, causal)
    return {"output": output_of(found, q, k, v, causal, window)}
