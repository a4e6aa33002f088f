"""torch's own attention without any position."""

import torch.nn.functional as F

CASES = [{}]


def reads_positions(options):
    return False  # the order of the tokens is all


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    return {"output": F.scaled_dot_product_attention(q, k, v, is_causal=causal)}
