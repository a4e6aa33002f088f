"""Each block of heads by the oracle of the encoding it uses; which head is in which block is a loop."""

import dataclasses

import torch

from oracles import _attention, _inner
from oracles.layered import inside

CASES = [
    {},
    {"heads": [{"name": "rope", "base": 500.0}, {"name": "none"}, {"name": "fox"}]},
    {"heads": [{"name": "alibi"}, {"name": "t5", "num_buckets": 8, "max_distance": 20}]},
    {"heads": [{"name": "shaw", "max_distance": 5, "values": False}, {"name": "alibi"}]},
]
TOLERANCE = {"atol": 1e-4, "rtol": 1e-5}  # rope's, by transformers' fp32 angles
PARTLY_UNUSED = "rows of shaw's table, as there"


def blocks(shape, options):
    """The entries that have heads, each with these heads and the shape of a model of as many."""
    entries = options["heads"]
    for place, entry in enumerate(entries):
        heads = [head for head in range(shape.n_heads) if head * len(entries) // shape.n_heads == place]
        if heads:
            width = shape.d_model if entry["name"] == "fox" else len(heads) * shape.head_dim  # fox reads x
            yield entry, heads, dataclasses.replace(shape, d_model=width, n_heads=len(heads), n_kv_heads=len(heads))


def parameter_count(shape, options):
    return sum(_inner.parameter_count(narrow, inside(entry)) for entry, _, narrow in blocks(shape, options))


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    output = []
    for at, (entry, heads, narrow) in enumerate(blocks(shape, options)):
        given = [each[:, heads] for each in (q, k, v)]
        found = _inner.found(parameters, narrow, inside(entry), *given, x, positions, layer, causal, at=at)
        output.append(_attention.output_of(found, *given, causal))
    return {"output": torch.cat(output, dim=1)}
