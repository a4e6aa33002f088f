"""transformers, rope_type `yarn`, for the index ramp; for the rotations ramp its `llama3` and YaRN's temperature."""

from oracles._transformers import TOLERANCE, frequencies, rotated

CASES = [
    {},
    {"layout": "half", "factor": 16.0, "base": 500.0, "alpha": 0.5, "beta": 4.0},
    {"ramp": "rotations", "alpha": 1.0, "beta": 5.0},
]


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    base, factor = options["base"], options["factor"]
    alpha, beta = options["alpha"], options["beta"]
    inv_freq, temperature = frequencies("yarn", shape, base, factor=factor, beta_slow=alpha, beta_fast=beta)
    if options["ramp"] == "rotations":
        parts = {"low_freq_factor": alpha, "high_freq_factor": beta}
        inv_freq, _ = frequencies("llama3", shape, base, factor=factor, **parts)
    return rotated(q, k, positions, options["layout"], inv_freq, temperature)
