"""transformers, rope_type `proportional`."""

from oracles._transformers import TOLERANCE, frequencies, rotated

CASES = [{}, {"layout": "half", "fraction": 0.25}, {"fraction": 0.0}, {"fraction": 1.0, "base": 500.0}]


def reads_positions(options):
    return options["fraction"] > 0


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    found = frequencies("proportional", shape, options["base"], partial_rotary_factor=options["fraction"])
    return rotated(q, k, positions, options["layout"], *found)
