"""transformers Inkling's short convolution (with its residual), on what is convolved; torch's attention after it."""

import torch
import torch.nn.functional as F

from oracles import third_party

CASES = [{}, {"convolved": "kv", "width": 3}, {"convolved": "qk", "residual": False}]


def reads_positions(options):
    return False  # the order of the tokens is all


def parameter_count(shape, options):
    heads = {"q": shape.n_heads, "k": shape.n_kv_heads, "v": shape.n_kv_heads}
    return shape.n_layers * shape.head_dim * options["width"] * sum(heads[a] for a in options["convolved"])


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
    output = F.scaled_dot_product_attention(*given.values(), is_causal=causal)
    return {"q": given["q"], "k": given["k"], "output": output}
