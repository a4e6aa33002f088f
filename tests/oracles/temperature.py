"""transformers' scales where it has them, else plain loops, on the queries of the inner encoding's oracle."""

import math

import torch

from oracles import _attention, _inner, third_party

CASES = [
    {},
    {"rule": "mistral_large4"},
    {"rule": "logn", "inner": "none"},
    {"rule": "llama4", "inner": "none", "alpha": 0.5, "floor": 4},
    {"rule": "inkling", "inner": "alibi", "alpha": 0.5, "floor": 3},
]
TOLERANCE = {"atol": 1e-4, "rtol": 1e-5}  # rope's, by transformers' fp32 angles
GRAPH_BREAKS = "what a layer uses is made of the inner encoding whenever it is asked for"


def parameter_count(shape, options):
    return {"ssmax": 1, "mistral_large4": 2}.get(options["rule"], 0) * shape.n_layers * shape.n_heads


def reads_positions(options):
    return options["inner"] != "none"  # the temperature counts tokens


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    found = _inner.found(parameters, shape, options, q, k, v, x, positions, layer, causal)
    found["q"] = sharpened(found.get("q", q), parameters, shape, options, layer)
    found.pop("output", None)
    return {"output": _attention.output_of(found, q, k, v, causal)}


def sharpened(q, parameters, shape, options, layer):
    rule, length = options["rule"], q.shape[2]
    floor = options["floor"] or shape.train_length
    if rule == "mistral_large4":
        module = third_party("transformers.models.mistral_large4.modeling_mistral_large4")
        learned = {"scale": parameters[f"scale.{layer}"], "bias": parameters[f"offset.{layer}"]}
        args = (q, torch.arange(length)[None], True)
        return torch.func.functional_call(module.MistralLarge4TextSoftmaxScaling(shape.n_heads), learned, args)
    if rule == "llama4":  # Ministral 3 counts positions from 0, Llama 4 tokens
        module = third_party("transformers.models.ministral3.modeling_ministral3")
        return q * module.get_llama_4_attn_scale(torch.arange(1, length + 1)[None], options["alpha"], floor)

    def factor(head, n):
        if rule == "ssmax":
            return parameters[f"scale.{layer}"][head] * math.log(n)
        if rule == "logn":
            return math.log(n, shape.train_length) if n > shape.train_length else 1.0
        return 1 + options["alpha"] * math.log(max(1, n / floor))

    rows = [torch.stack([q[:, h, i] * factor(h, i + 1) for i in range(length)], 1) for h in range(shape.n_heads)]
    return torch.stack(rows, 1)
