"""x-transformers RotaryEmbedding with use_xpos (interleaved; the half layout is a permutation of channels)."""

import math

import torch

from oracles import third_party

CASES = [{}, {"layout": "half", "scale_base": 20.0}, {"base": 500.0}]
CAUSAL = (True,)  # the decay would be a growth towards keys after the query
TOLERANCE = {"atol": 1e-4, "rtol": 1e-5}  # their angles are fp32: off by 1000 · 2^-24 = 6e-5 at position 1000


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    x_transformers = third_party("x_transformers.x_transformers")
    scale_base = options["scale_base"] or shape.train_length / 2
    embedding = x_transformers.RotaryEmbedding(
        shape.head_dim, use_xpos=True, scale_base=scale_base, base=options["base"]
    )
    if options["layout"] == "half":
        q, k = (a.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) for a in (q, k))
    freqs, scale = embedding(positions)
    q = x_transformers.apply_rotary_pos_emb(q, freqs, scale)
    k = x_transformers.apply_rotary_pos_emb(k, freqs, scale**-1)
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    logits = (q @ k.mT / math.sqrt(shape.head_dim)).masked_fill(hidden, -math.inf)
    return {"probabilities": logits.softmax(-1)}
