"""Plain loops over positions, around what the oracle of the inner encoding says."""

import math

import torch

from oracles import _inner

CASES = [{}, {"inner": "none", "tau": 3.0}, {"inner": "kerple_log"}]
TOLERANCE = {"atol": 1e-4, "rtol": 1e-5}  # rope's, by transformers' fp32 angles
GRAPH_BREAKS = "what a layer uses is made of the inner encoding whenever it is asked for"


def parameter_count(shape, options):
    return _inner.parameter_count(shape, options)


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    found = _inner.found(parameters, shape, options, q, k, v, x, positions, layer, causal)
    logits = found.get("q", q) @ found.get("k", k).mT / math.sqrt(shape.head_dim) + found.get("bias", 0)
    rows, length = positions.expand(len(q), -1).tolist(), q.shape[2]
    output = []
    for b in range(len(q)):
        scales, shifts = torch.ones(length, length), torch.zeros(length, length)
        for i in range(length):
            for j in range(length):
                growth = math.log(abs(rows[b][i] - rows[b][j]) / options["tau"] + 1)
                scales[i, j], shifts[i, j] = math.sqrt(2 * growth + 1), -2 * growth
                if causal and j > i:
                    shifts[i, j] = -math.inf
        output.append((logits[b] * scales + shifts).softmax(-1) @ v[b])
    return {"output": torch.stack(output)}
