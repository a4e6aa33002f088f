"""x-transformers' DynamicPositionBias where positions are consecutive, else its network at each pair."""

import torch
import torch.nn.functional as F

from oracles import third_party

CASES = [{}, {"log": False}, {"width": 5, "depth": 1}]


def parameter_count(shape, options):
    width, depth = options["width"] or shape.d_model // 4, options["depth"]
    return 2 * width + (depth - 1) * (width + 1) * width + (width + 1) * shape.n_heads


PARTLY_UNUSED = "what shifts whole rows: the last constants"


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    depth = options["depth"]
    if len(positions) == 1:
        length = positions.shape[1]
        width = options["width"] or shape.d_model // 4
        dynamic = third_party("x_transformers.x_transformers").DynamicPositionBias(
            width, heads=shape.n_heads, depth=depth, log_distance=options["log"]
        )
        named = {
            f"mlp.{n}.{'0.' if n < depth else ''}{kind}": parameters[f"network.{n}.{'0.' if n < depth else ''}{kind}"]
            for n in range(depth + 1)
            for kind in ("weight", "bias")
        }
        return {"bias": torch.func.functional_call(dynamic, named, (length, length))[None]}
    distance = (positions[:, :, None] - positions[:, None, :]).float()
    found = (distance.sign() * torch.log(1 + distance.abs()) if options["log"] else distance)[..., None]
    for n in range(depth):
        found = F.silu(found @ parameters[f"network.{n}.0.weight"].T + parameters[f"network.{n}.0.bias"])
    bias = found @ parameters[f"network.{depth}.weight"].T + parameters[f"network.{depth}.bias"]
    return {"bias": bias.movedim(-1, 1)}
