"""The paper's definition, exp(n L) with torch's matrix exponential of the generator L; nothing else implements it."""

import torch

CASES = [{}, {"layout": "half", "base": 500.0, "divisor": 4.0}]
DTYPE = torch.float64


def parameter_count(shape, options):
    return shape.n_layers * shape.head_dim // 2


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    width = shape.head_dim
    generator = torch.zeros(width, width, dtype=torch.float64)
    for pair in range(width // 2):
        first, second = (2 * pair, 2 * pair + 1) if options["layout"] == "interleaved" else (pair, pair + width // 2)
        plane = torch.zeros(width, width, dtype=torch.float64)
        plane[second, first], plane[first, second] = 1, -1
        log_freq = -2 * pair / width * torch.tensor(options["base"], dtype=torch.float64).log()
        generator = generator + plane * (log_freq + parameters["alpha"][layer, pair] / options["divisor"]).exp()
    moved = torch.linalg.matrix_exp(positions[..., None, None] * generator)[:, None]  # (1|B, 1, T, Dh, Dh)
    return {"q": (moved @ q[..., None])[..., 0], "k": (moved @ k[..., None])[..., 0]}
