"""The oracle of the inner encoding, at whatever positions; test_wrappers.py looks at the draws."""

import dataclasses

from oracles import _attention, _inner

CASES = [{}, {"inner": "learned", "shift": 9}, {"inner": "t5", "inner_options": {"num_buckets": 8}, "shift": 40}]
PARTLY_UNUSED = "rows of the table beyond the input"
TOLERANCE = {"atol": 1e-4, "rtol": 1e-5}  # sinusoidal's, by transformers' fp32 angles


def parameter_count(shape, options):
    return _inner.parameter_count(reached(shape, options), options)


def reached(shape, options):
    return dataclasses.replace(shape, train_length=shape.train_length + options["shift"])


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    found = _inner.found(parameters, reached(shape, options), options, q, k, v, x, positions, layer, causal)
    return found if "embedded" in found else {"output": _attention.output_of(found, q, k, v, causal)}
