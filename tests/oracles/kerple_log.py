"""Plain loops from the paper's equation, in fp64; a number below 0.01 counts as 0.01, and its gradient passes."""

import torch

CASES = [{}]
DTYPE = torch.float64


def parameter_count(shape, options):
    return 2 * shape.n_heads  # shared by all layers


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    r1, r2 = (held(parameters[name], 0.01, float("inf")) for name in ("r1", "r2"))

    def bias(i, j):
        return -r1 * torch.log(1 + r2 * abs(i - j))

    return {"bias": by_pairs(bias, positions)}


def held(numbers, least, most):
    """Each number as the nearest one in the range, which the gradient does not see."""
    return torch.stack([r - r.detach() + min(max(r.item(), least), most) for r in numbers])


def by_pairs(bias, positions):
    """(1|B, H, T, T) of a function of two positions that gives a number per head."""
    batches = [torch.stack([torch.stack([bias(i, j) for j in row]) for i in row]) for row in positions.tolist()]
    return torch.stack(batches).permute(0, 3, 1, 2)
