"""The oracle of the inner encoding, which is shown whatever positions were drawn."""

import dataclasses

from oracles import _inner

CASES = [
    {},
    {"inner": "t5", "inner_options": {"num_buckets": 8, "max_distance": 20}},
    {"continuous": True, "inner": "alibi"},
    {"max_length": lambda shape: shape.train_length},
]
TOLERANCE = {"atol": 1e-4, "rtol": 1e-5}  # rope's, by transformers' fp32 angles
parameter_count = _inner.parameter_count


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    reached = dataclasses.replace(shape, train_length=options["max_length"] or 16 * shape.train_length)
    return {"output": _inner.output_of(parameters, reached, options, q, k, v, x, positions, layer, causal)}
