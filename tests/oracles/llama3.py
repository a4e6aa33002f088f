"""transformers, rope_type `llama3`."""

from oracles._transformers import TOLERANCE, frequencies, rotated

CASES = [{}, {"layout": "half", "base": 500.0, "low_freq_factor": 0.5, "high_freq_factor": 3.0}]


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    parts = {name: options[name] for name in ("factor", "low_freq_factor", "high_freq_factor")}
    return rotated(q, k, positions, options["layout"], *frequencies("llama3", shape, options["base"], **parts))
