"""transformers: inner products of DistilBERT's sinusoidal positions, over the heads' strengths."""

import torch

from oracles.sinusoidal import make_table

CASES = [{}, {"width": 8}]
TOLERANCE = {"atol": 2e-5, "rtol": 1e-5}  # inner products of 128 numbers, in fp32


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    table = make_table(shape.train_length, options["width"], {"base": 10000, "layout": "interleaved"})
    code = table[positions]  # (1|B, T, width)
    inner = torch.einsum("bid,bjd->bij", code, code)
    return {"bias": torch.stack([inner / (8 / shape.n_heads * h) for h in range(1, shape.n_heads + 1)], dim=1)}
