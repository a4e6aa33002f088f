"""transformers' Inkling for positions that all sequences share, x-transformers' version for positions from 0 on; else
a plain loop."""

import torch

from oracles import third_party

CASES = [{}, {"extent": 5, "curves": 3}]


def parameter_count(shape, options):
    extent = options["extent"] or shape.train_length
    return shape.n_layers * options["curves"] * (shape.n_heads * shape.d_model + extent)


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    weight, curves = parameters["weight"][layer], parameters["curves"][layer]
    count, extent = curves.shape
    if len(positions) > 1:
        rows = zip(x, positions.tolist(), strict=True)
        return {"bias": torch.stack([looped(weight, curves, own, row) for own, row in rows])}
    if positions[0, 0] == 0 and positions.shape[1] > 2:
        projected = third_party("x_transformers.x_transformers").RelativeProjPositionalBias(
            shape.d_model, shape.n_heads, num_distance_basis=count, max_dist=extent
        )
        named = {
            "to_distance_weights.0.weight": weight.flatten(0, 1),
            "to_distance_weights.0.bias": torch.zeros(shape.n_heads * count),  # Inkling has none
            "distance_bank": curves,
        }
        return {"bias": torch.func.functional_call(projected, named, (x,))}
    inkling = third_party("transformers.models.inkling.modeling_inkling").InklingRelativeLogits(count, extent)
    states = torch.einsum("btd,hcd->bthc", x, weight)
    return {"bias": torch.func.functional_call(inkling, {"proj": curves}, (states, positions[0], positions[0]))}


def looped(weight, curves, x, row):
    """The bias (H, T, T) of one sequence at these positions."""
    mixtures = torch.einsum("td,hcd->thc", x, weight)
    zero = torch.zeros(len(weight))
    lines = [
        torch.stack([mixed @ curves[:, i - j] if 0 <= i - j < curves.shape[1] else zero for j in row])
        for i, mixed in zip(row, mixtures, strict=True)
    ]
    return torch.stack(lines).permute(2, 0, 1)
