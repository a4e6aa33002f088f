"""x-transformers' PolarEmbedding, one sequence at a time (its positions are those of all sequences)."""

import torch

from oracles import third_party
from oracles._transformers import TOLERANCE

CASES = [{}, {"base": 500.0, "phase_init": "uniform"}]
PARTLY_UNUSED = "phases that have left their bounds, where clamping ends the gradient"


def parameter_count(shape, options):
    return shape.n_layers * shape.n_heads * shape.head_dim


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    x_transformers = third_party("x_transformers.x_transformers")
    polar = x_transformers.PolarEmbedding(shape.head_dim, shape.n_heads, base=options["base"])
    phase = {"learned_bias": parameters["phase"][layer][:, None]}
    turned = []
    for b, place in enumerate(positions.expand(len(q), -1)):
        angles, bias = torch.func.functional_call(polar, phase, (place,))
        apply = x_transformers.apply_polar_pos_emb
        turned.append((apply(q[b : b + 1], angles), apply(k[b : b + 1], angles + bias)))
    return {name: torch.cat(parts) for name, parts in zip("qk", zip(*turned, strict=True), strict=True)}
