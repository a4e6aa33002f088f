"""fla-core's naive forgetting attention for the causal output, x-transformers' DataDependentAlibi for the bias."""

import torch
import torch.nn.functional as F

from oracles import third_party, third_party_file
from oracles.none import reads_positions

CASES = [{}]


def parameter_count(shape, options):
    return shape.n_layers * shape.n_heads * (shape.d_model + 1)


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    weight, bias = parameters["weight"][layer], parameters["gate_bias"][layer]
    alibi = third_party("x_transformers.x_transformers").DataDependentAlibi(shape.d_model, shape.n_heads, causal=True)
    names = [name for name, _ in alibi.named_parameters()]
    named = {name: weight if name.endswith("weight") else bias for name in names}
    assert len(named) == 2, names
    out = {"bias": torch.func.functional_call(alibi, named, (x,))}
    if causal:
        fla = third_party_file("fla", "ops/forgetting_attn/naive.py")
        gates = F.logsigmoid(torch.einsum("btd,hd->bth", x, weight) + bias)
        output = fla.naive_forgetting_attn(*(a.transpose(1, 2) for a in (q, k, v)), gates)
        out["output"] = output.transpose(1, 2)
    return out
