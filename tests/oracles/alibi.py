"""transformers BLOOM under a causal mask (its bias grows with the key's index: equal up to a constant per row);
x-transformers without one, and for positions that are not consecutive."""

import torch

from oracles import third_party

CASES = [{}, {"slopes": lambda shape: [1.5 - 0.25 * h for h in range(shape.n_heads)]}]


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    slopes = options["slopes"]
    consecutive = bool((positions.diff() == 1).all())
    if slopes is None and causal and consecutive:
        bloom = third_party("transformers.models.bloom.modeling_bloom")
        bias = bloom.build_alibi_tensor(torch.ones(1, q.shape[2]), shape.n_heads, torch.float32)
        return {"bias": bias[None]}  # (1, H, 1, T)
    alibi = third_party("x_transformers.x_transformers").AlibiPositionalBias(shape.n_heads, slopes=slopes)
    return {"bias": alibi.forward_custom_pos(positions.expand(len(q), -1))}
