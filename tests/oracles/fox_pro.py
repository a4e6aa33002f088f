"""fla-core's naive forgetting attention on keys and values that plain loops have shifted; norms and gates by loops."""

import torch
import torch.nn.functional as F

from oracles import third_party_file
from oracles.none import reads_positions

_NONE = {"kv_shift": False, "qk_norm": False, "output_norm": False, "output_gate": False}
CASES = [
    {},
    {**_NONE, "kv_shift": True},
    {**_NONE, "qk_norm": True, "output_gate": True},
    {"kv_shift": False, "output_gate": False},
]
CAUSAL = (True,)


def parameter_count(shape, options):
    heads, kv_heads, width, model = shape.n_heads, shape.n_kv_heads, shape.head_dim, shape.d_model
    gates = heads * (model + 1) + options["output_gate"] * heads * width * model
    norms = options["qk_norm"] * (heads + kv_heads) * width + options["output_norm"] * heads * width
    return shape.n_layers * (gates + norms + options["kv_shift"] * 2 * kv_heads * model)


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    def shifted(name, a):
        rows = []
        for t in range(a.shape[2]):
            share = torch.sigmoid(torch.einsum("bd,hd->bh", x[:, t], parameters[f"shifts.{name}"][layer]))[..., None]
            before = a[:, :, t - 1] if t else torch.zeros_like(a[:, :, 0])
            rows.append(share * before + (1 - share) * a[:, :, t])
        return torch.stack(rows, 2)

    def normed(name, a, epsilon):
        heads = [a[:, h] / (a[:, h].pow(2).mean(-1, keepdim=True) + epsilon).sqrt() for h in range(shape.n_heads)]
        return torch.stack([head * parameters[f"norms.{name}"][layer, h] for h, head in enumerate(heads)], 1)

    if options["kv_shift"]:
        k, v = shifted("k", k), shifted("v", v)
    if options["qk_norm"]:
        q, k = normed("q", q, 1e-5), normed("k", k, 1e-5)
    gates = torch.einsum("btd,hd->bth", x, parameters["weight"][layer]) + parameters["gate_bias"][layer]
    fla = third_party_file("fla", "ops/forgetting_attn/naive.py")
    out = fla.naive_forgetting_attn(*(a.transpose(1, 2) for a in (q, k, v)), F.logsigmoid(gates)).transpose(1, 2)
    if options["output_norm"]:
        out = normed("output", out, 1e-6)
    if options["output_gate"]:
        opened = torch.sigmoid(x @ parameters["output_gate"][layer].T)
        out = out * torch.stack(opened.split(shape.head_dim, dim=-1), 1)
    return {"output": out}
