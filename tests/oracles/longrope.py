"""transformers, rope_type `longrope`, given the divisors of its rope_type `yarn` and one sequence at a time."""

import torch

from oracles._transformers import TOLERANCE, frequencies, rotated

CASES = [
    {"original_length": lambda shape: 3 * shape.train_length // 4},
    {"original_length": 20, "layout": "half", "factor": 8.0, "base": 500.0},
]


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    base, factor, original = options["base"], options["factor"], options["original_length"] or shape.train_length
    plain, _ = frequencies("linear", shape, base, factor=1.0)
    yarn, _ = frequencies("yarn", shape, base, original, factor=factor)
    divisors = {"long_factor": (plain / yarn).tolist(), "short_factor": [1.0] * len(plain)}
    lengths = (int(last) + 1 for last in positions.amax(-1))
    found = [frequencies("longrope", shape, base, original, length, factor=factor, **divisors) for length in lengths]
    inv_freq = torch.stack([frequency for frequency, _ in found])[:, None]  # (1|B, 1, Dh/2)
    return rotated(q, k, positions, options["layout"], inv_freq, found[0][1])
