"""transformers, rope_type `linear`."""

from oracles._transformers import TOLERANCE, frequencies, rotated

CASES = [{}, {"layout": "half", "factor": 2.5, "base": 500.0}]


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    found = frequencies("linear", shape, options["base"], factor=options["factor"])
    return rotated(q, k, positions, options["layout"], *found)
