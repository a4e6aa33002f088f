"""transformers: the frequencies of rope_type `yarn` for the index ramp, of `llama3` for the rotations ramp."""

from oracles._transformers import TOLERANCE, frequencies, rotated

CASES = [
    {},
    {"layout": "half", "factor": 16.0, "base": 500.0, "alpha": 0.5, "beta": 4.0},
    {"ramp": "rotations", "alpha": 1.0, "beta": 5.0},
]


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    slow, fast = options["alpha"], options["beta"]
    kind, parts = "yarn", {"beta_slow": slow, "beta_fast": fast}
    if options["ramp"] == "rotations":
        kind, parts = "llama3", {"low_freq_factor": slow, "high_freq_factor": fast}
    inv_freq, _ = frequencies(kind, shape, options["base"], factor=options["factor"], **parts)
    return rotated(q, k, positions, options["layout"], inv_freq)
