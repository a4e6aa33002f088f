"""x-transformers' CoPE module, on the scaled and masked logits."""

import torch

from oracles import third_party
from oracles.none import reads_positions

CASES = [{"max_position": 4}, {}]
PARTLY_UNUSED = "counts beyond the input"


def parameter_count(shape, options):
    return shape.n_layers * options["max_position"] * shape.head_dim


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    length, width = q.shape[2:]
    logits = torch.einsum("bhid,bhjd->bhij", q, k) * width**-0.5
    if causal:
        hidden = ~torch.ones(length, length, dtype=torch.bool).tril()
        logits = logits.masked_fill(hidden, -torch.finfo(logits.dtype).max)
    cope = third_party("x_transformers.x_transformers").CoPE(width, shape.n_heads, options["max_position"])
    bias = torch.func.functional_call(cope, {"pos_emb": parameters["table"][layer]}, (q, logits))
    return {"probabilities": (logits + bias).softmax(-1)}
