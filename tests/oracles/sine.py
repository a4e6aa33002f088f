"""Sines, a speed per channel: math.sin in plain loops."""

import math

import torch

CASES = [{}, {"base": 500.0, "scale": 1.0}, {"combine": "concat", "scale": 2.0}]


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    scale = shape.token_rms if options["scale"] == "token" else options["scale"]
    width = shape.d_model if options["combine"] == "add" else shape.d_model // 4
    rows = []
    for b in range(x.shape[0]):
        for i in range(x.shape[1]):
            position = positions[b % len(positions), i].item()
            code = [scale * math.sin(position / options["base"] ** (j / width)) for j in range(width)]
            code = x.new_tensor(code)
            rows.append(x[b, i] + code if options["combine"] == "add" else torch.cat([x[b, i, :-width], code]))
    return {"embedded": torch.stack(rows).view(x.shape[0], x.shape[1], shape.d_model)}
