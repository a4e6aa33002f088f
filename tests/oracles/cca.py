"""transformers Zaya: its projection, given q, k and v to pick from; the inner oracle after it."""

import types

import torch

from oracles import _inner, third_party

CASES = [{}, {"channel_width": 4, "head_width": 1}, {"inner": "rope"}, {"inner": "fox"}]
TOLERANCE = {"atol": 1e-4, "rtol": 1e-5}  # rope's, by transformers' fp32 angles
GRAPH_BREAKS = "what a layer uses is made of the inner encoding whenever it is asked for"
PARTLY_UNUSED = "biases of keys: what all keys have alike changes no weight"


def reads_positions(options):
    return options["inner"] == "rope"  # else the order of the tokens is all


def parameter_count(shape, options):
    heads = shape.n_heads + shape.n_kv_heads
    channel = heads * shape.head_dim * (options["channel_width"] + 1)
    head = heads * shape.head_dim * (shape.head_dim * options["head_width"] + 1)
    return shape.n_layers * (channel + head) + _inner.parameter_count(shape, options)


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    zaya = third_party("transformers.models.zaya.modeling_zaya")
    size = shape.n_heads * shape.head_dim
    config = types.SimpleNamespace(
        hidden_size=3 * size,
        cca_time0=options["channel_width"],
        cca_time1=options["head_width"],
        num_attention_heads=shape.n_heads,
        num_key_value_heads=shape.n_heads,
        head_dim=shape.head_dim,
        attention_bias=False,
    )
    picked = torch.eye(3 * size).split([size, size, size // 2, size // 2])
    names = ("q_proj", "k_proj", "v_proj_current", "v_proj_delayed")
    weights = {f"{name}.weight": rows for name, rows in zip(names, picked, strict=True)}
    for ours, theirs in (("by_channel", "conv_qk_depthwise"), ("by_head", "conv_qk_grouped")):
        weights |= {f"{theirs}.{kind}": parameters[f"{ours}.{layer}.{kind}"] for kind in ("weight", "bias")}
    wide = torch.cat([a.transpose(1, 2).flatten(2) for a in (q, k, v)], dim=-1)
    found = torch.func.functional_call(zaya.ZayaCCAProjection(config, 0), weights, (wide, None))
    q, k, v = (a.transpose(1, 2) for a in found)
    output = _inner.output_of(parameters, shape, options, q, k, v, x, positions, layer, causal)
    return {"output": output} if options["inner"] != "none" else {"q": q, "k": k, "output": output}
