"""Plain loops from the paper's equation, in fp64; a number out of its range counts as the nearest one in it."""

import torch

from oracles.kerple_log import by_pairs, held, parameter_count

CASES = [{}]
DTYPE = torch.float64


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    r1, r2 = held(parameters["r1"], 0.01, float("inf")), held(parameters["r2"], 0.01, 2.0)

    def bias(i, j):
        distance = torch.tensor(abs(i - j), dtype=torch.float64)
        return -r1 * (torch.exp(r2 * distance.log()) if distance else 0)

    return {"bias": by_pairs(bias, positions)}
