"""transformers Inkling's short convolution (with its residual), on what is convolved; the inner oracle after it."""

import torch

from oracles import _inner, third_party

CASES = [
    {},
    {"convolved": "kv", "width": 3},
    {"convolved": "qk", "residual": False},
    {"inner": "rope"},
    {"convolved": "kv", "inner": "alibi"},
    {"inner": "shaw", "inner_options": {"max_distance": 5, "values": False}},
]
TOLERANCE = {"atol": 1e-4, "rtol": 1e-5}  # rope's, by transformers' fp32 angles
PARTLY_UNUSED = "rows of shaw's table, as there"
GRAPH_BREAKS = "what a layer uses is made of the inner encoding whenever it is asked for"


def reads_positions(options):
    return options["inner"] != "none"  # else the order of the tokens is all


def parameter_count(shape, options):
    heads = {"q": shape.n_heads, "k": shape.n_kv_heads, "v": shape.n_kv_heads}
    own = shape.n_layers * shape.head_dim * options["width"] * sum(heads[a] for a in options["convolved"])
    return own + _inner.parameter_count(shape, options)


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    inkling = third_party("transformers.models.inkling.modeling_inkling")
    convolution = inkling.InklingShortConvolution(shape.d_model, options["width"], layer_idx=0, conv_idx=0)
    given = {"q": q, "k": k, "v": v}
    for name in options["convolved"]:
        weight = {"conv1d.weight": parameters[f"weights.{name}"][layer].flatten(0, 1)[:, None]}
        flat = given[name].transpose(1, 2).flatten(2)
        out = torch.func.functional_call(convolution, weight, (flat,))
        out = out if options["residual"] else out - flat
        given[name] = out.unflatten(2, (shape.n_heads, shape.head_dim)).transpose(1, 2)
    output = _inner.output_of(parameters, shape, options, *given.values(), x, positions, layer, causal)
    return {"output": output} if options["inner"] != "none" else {"q": given["q"], "k": given["k"], "output": output}
