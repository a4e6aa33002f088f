"""Plain loops from the paper, with the weights of a learnable scheme; the frozen ones are tested in test_schemes.py."""

import math

import torch

CASES = [
    {"learnable": True},
    {"learnable": True, "layout": "half", "base": 500.0, "still_sine": 1.0},
    {"gain": 0.0},
]
DTYPE = torch.float64


def _frequencies(shape, options):
    width = shape.head_dim
    every = [options["base"] ** (-2 * pair / width) for pair in range(width // 2)]
    return [f for f in every if f * shape.train_length >= 2 * math.pi]


def parameter_count(shape, options):
    if not options["learnable"]:
        return 0
    kept = len(_frequencies(shape, options))
    return shape.n_layers * 2 * shape.n_heads * kept * min(kept, shape.head_dim // 4)


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    kept, pairs = _frequencies(shape, options), shape.head_dim // 2
    turning = min(len(kept), shape.head_dim // 4)
    step = math.ceil(len(kept) / turning)

    def weight(part, head, m, u):
        if options["learnable"]:
            return parameters["coefficients"][part, layer, head, m, u]
        return float(m == u * step)

    def moved(a):
        out = a.clone()
        places = positions.double()
        for head in range(shape.n_heads):
            for u in range(pairs):
                cos, sin = torch.ones_like(places), torch.full_like(places, options["still_sine"])
                if u < turning:
                    cos = sum(weight(0, head, m, u) * (places * f).cos() for m, f in enumerate(kept))
                    sin = sum(weight(1, head, m, u) * (places * f).sin() for m, f in enumerate(kept))
                one, two = (2 * u, 2 * u + 1) if options["layout"] == "interleaved" else (u, u + pairs)
                first, second = a[:, head, :, one], a[:, head, :, two]
                out[:, head, :, one] = first * cos - second * sin
                out[:, head, :, two] = second * cos + first * sin
        return out

    return {"q": moved(q), "k": moved(k)}
