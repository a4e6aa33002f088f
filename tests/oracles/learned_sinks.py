"""transformers' gpt-oss attention, given the queries, keys and biases of the inner encoding's oracle."""

import types

import torch

from oracles import _inner, third_party

CASES = [{}, {"inner": "none"}, {"inner": "alibi"}, {"inner": "fox"}]
TOLERANCE = {"atol": 1e-4, "rtol": 1e-5}  # rope's, by transformers' fp32 angles
GRAPH_BREAKS = "what a layer uses is made of the inner encoding whenever it is asked for"


def parameter_count(shape, options):
    return shape.n_layers * shape.n_heads + _inner.parameter_count(shape, options)


def reads_positions(options):
    return options["inner"] in ("rope", "alibi")


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    gpt_oss = third_party("transformers.models.gpt_oss.modeling_gpt_oss")
    found = _inner.found(parameters, shape, options, q, k, v, x, positions, layer, causal)
    length = q.shape[2]
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1) if causal else torch.zeros(length, length)
    # Up to a number per row, which a sink would see: the formulas of both biases here have 0 for the query's own key.
    bias = torch.as_tensor(found.get("bias", 0.0)).expand(len(q), shape.n_heads, length, length)
    bias = bias - bias.diagonal(dim1=-2, dim2=-1)[..., None]
    mask = torch.zeros(length, length).masked_fill(hidden.bool(), -torch.inf) + bias
    module = types.SimpleNamespace(num_key_value_groups=1, sinks=parameters["sinks"][layer], training=False)
    output, _ = gpt_oss.eager_attention_forward(
        module, found.get("q", q), found.get("k", k), v, mask, scaling=shape.head_dim**-0.5
    )
    return {"output": output.transpose(1, 2)}
