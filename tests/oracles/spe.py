"""Plain loops over pairs of tokens and channels, from the authors' code in the mean of its draws."""

import math

import torch

CASES = [{}, {"sines": 3}, {"sines": 2, "gated": False}]
DTYPE = torch.float64


def parameter_count(shape, options):
    return shape.n_layers * shape.n_heads * shape.head_dim * (3 * options["sines"] + options["gated"])


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    sines, length = options["sines"], q.shape[2]
    gain = torch.nn.functional.softplus(parameters["gain"][layer])
    frequency = torch.sigmoid(parameters["frequency"][layer]) / 2  # turns per token
    phase = parameters["phase"][layer]
    gate = torch.sigmoid(parameters["gate"][layer]) if options["gated"] else torch.zeros(gain.shape[:2])
    rows = []
    for i in range(length):
        row = []
        for j in range(length):
            distance = (positions[:, i] - positions[:, j]).double()[:, None, None]  # (1|B, 1, 1)
            kernel = 0
            for s in range(sines):
                wave = torch.cos(2 * math.pi * frequency[..., s] * distance + phase[..., s])
                kernel = kernel + gain[..., s] ** 2 * wave / (2 * sines)
            kernel = (1 - gate) * kernel + gate
            row.append((q[:, :, i] * k[:, :, j] * kernel).sum(-1) / math.sqrt(shape.head_dim))
        rows.append(torch.stack(row, dim=-1))
    logits = torch.stack(rows, dim=2)
    if causal:
        logits = logits.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
    return {"output": logits.softmax(-1) @ v}
