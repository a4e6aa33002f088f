"""transformers, rope_type `dynamic`, given one sequence at a time."""

import torch

from oracles._transformers import TOLERANCE, frequencies, rotated

CASES = [
    {"original_length": lambda shape: 3 * shape.train_length // 4},
    {"original_length": 16, "layout": "half", "factor": 2.0, "base": 500.0},
]


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    original = options["original_length"] or shape.train_length
    lengths = (int(last) + 1 for last in positions.amax(-1))
    found = [
        frequencies("dynamic", shape, options["base"], original, length, factor=options["factor"])[0]
        for length in lengths
    ]
    return rotated(q, k, positions, options["layout"], torch.stack(found)[:, None])  # (1|B, 1, Dh/2)
