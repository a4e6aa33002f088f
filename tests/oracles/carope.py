"""Plain loops over tokens and pairs from the paper's section 2; no package has it."""

import torch

from oracles.none import reads_positions

CASES = [{}, {"layout": "half", "base": 500.0}]
DTYPE = torch.float64


def parameter_count(shape, options):
    return shape.n_layers * shape.n_heads * shape.d_model


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    width, pairs = shape.head_dim, shape.head_dim // 2
    start = torch.tensor(options["base"], dtype=torch.float64) ** (2 / width) - 1  # 1/f - 1 where xW is 0
    constant = (start.exp() - 1).log()
    weight = parameters["step"][layer]  # (H, D)
    out = {"q": torch.zeros_like(q), "k": torch.zeros_like(k)}
    for head in range(shape.n_heads):
        for p in range(pairs):
            one, two = (2 * p, 2 * p + 1) if options["layout"] == "interleaved" else (p, p + pairs)
            angle = 0
            for t in range(x.shape[1]):
                f = 1 / (torch.nn.functional.softplus(x[:, t] @ weight[head] + constant) + 1)
                angle = angle + f**p
                for name, a in (("q", q), ("k", k)):
                    first, second = a[:, head, t, one], a[:, head, t, two]
                    out[name][:, head, t, one] = first * angle.cos() - second * angle.sin()
                    out[name][:, head, t, two] = second * angle.cos() + first * angle.sin()
    return out
