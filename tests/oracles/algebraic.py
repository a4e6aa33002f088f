"""Plain loops: the power of torch's matrix exponential at each position, as in the paper's section 3.1."""

import torch

from oracles._skew import generator

CASES = [{}, {"decay": 1.0}]
DTYPE = torch.float64
GRAPH_BREAKS = "looks at the positions' values, to know how many binary digits they have"


def parameter_count(shape, options):
    return shape.n_heads * shape.head_dim * (shape.head_dim - 1) // 2


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    width = shape.head_dim
    step = [torch.linalg.matrix_exp(generator(entries, width)) for entries in parameters["above"][0, :, 0]]
    rows = positions.expand(len(q), -1)
    maps = torch.stack(
        [torch.stack([torch.stack([torch.linalg.matrix_power(w, int(n)) for n in row]) for w in step]) for row in rows]
    )  # (B, H, T, Dh, Dh)
    told = {"q": (maps @ q[..., None])[..., 0], "k": (maps @ k[..., None])[..., 0]}
    logits = told["q"] @ told["k"].mT / width**0.5
    for m in range(q.shape[2]):
        for n in range(q.shape[2]):
            if causal and n > m:
                logits[:, :, m, n] = -torch.inf
            else:
                distance = (rows[:, m] - rows[:, n]).abs()
                logits[:, :, m, n] = logits[:, :, m, n] * options["decay"] ** distance[:, None]
    return {**told, "output": logits.softmax(-1) @ v}
