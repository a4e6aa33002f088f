"""Plain loops over pairs; no package has it."""

import math

import torch

CASES = [{}, {"layout": "half", "base": 500.0}]
DTYPE = torch.float64


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    pairs = shape.head_dim // 2

    def moved(a):
        out = a.clone()
        for p in range(pairs):
            frequency = options["base"] ** (-2 * p / shape.head_dim)
            if shape.train_length * frequency / (2 * math.pi) < 1:
                continue
            one, two = (2 * p, 2 * p + 1) if options["layout"] == "interleaved" else (p, p + pairs)
            angle = positions[:, None].double() * frequency
            out[..., one] = a[..., one] * angle.cos() - a[..., two] * angle.sin()
            out[..., two] = a[..., two] * angle.cos() + a[..., one] * angle.sin()
        return out

    return {"q": moved(q), "k": moved(k)}
