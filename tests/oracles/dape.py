"""Plain loops: the network run at every pair, on the bias that the oracle of the encoding inside gives."""

import dataclasses

import torch

from oracles import _inner

DTYPE = torch.float64  # a leaky ReLU takes the other side of its bend for what fp32 rounds

CASES = [
    {},
    {"inner": "alibi", "hidden": 5},
    {"inner": "fire", "inner_options": {"threshold": 5.0}},
    {"inner": "fox"},
    {"per_layer": False},
]
PARTLY_UNUSED = "what shifts whole rows, the last constants; FIRE's hidden units that are off at every distance"


def parameter_count(shape, options):
    heads, hidden = shape.n_heads, options["hidden"]
    network = 2 * heads * hidden + hidden + hidden * heads + heads
    return shape.n_layers * network + inner_count(shape, options)


def inner_count(shape, options):
    if not options["per_layer"]:
        return _inner.parameter_count(shape, options)
    return shape.n_layers * _inner.parameter_count(dataclasses.replace(shape, n_layers=1), options)


def reads_positions(options):
    return options["inner"] != "fox"


def inner_bias(parameters, shape, options, q, k, v, x, positions, layer, causal):
    """The bias of the encoding inside, broadcastable to (B, H, T, T)."""
    at, own_layer = (layer, 0) if options["per_layer"] else (0, layer)
    bias = _inner.found(parameters, shape, options, q, k, v, x, positions, own_layer, causal, at)["bias"]
    if options["inner"] in ("alibi", "fox"):  # their oracles leave a constant per row open: theirs is 0 at the query
        bias = bias - bias.expand(*bias.shape[:-2], *q.shape[2:3] * 2).diagonal(dim1=-2, dim2=-1)[..., None]
    return bias


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    z = q @ k.mT / shape.head_dim**0.5
    bias = inner_bias(parameters, shape, options, q, k, v, x, positions, layer, causal).expand(z.shape)
    w1, c1, w2, c2 = (parameters[f"networks.{layer}.{name}"] for name in ("0.weight", "0.bias", "2.weight", "2.bias"))
    rows = []
    for i in range(q.shape[2]):
        row = []
        for j in range(q.shape[2]):
            both = torch.cat([z[:, :, i, j], bias[:, :, i, j]], dim=1)  # (B, 2H)
            hidden = both @ w1.T + c1
            hidden = torch.where(hidden > 0, hidden, 0.01 * hidden)
            row.append(bias[:, :, i, j] + hidden @ w2.T + c2)
        rows.append(torch.stack(row, dim=-1))
    return {"bias": torch.stack(rows, dim=2)}
