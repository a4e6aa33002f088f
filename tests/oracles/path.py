"""PaTH: the authors' plain form in fla, fed with reflections made token by token."""

import torch

from oracles import third_party_file
from oracles.none import reads_positions

CASES = [{}, {"rank": 4, "silu": False}]
CAUSAL = (True,)


def parameter_count(shape, options):
    low_rank = 2 * options["rank"] * shape.d_model
    convolution = 3 * shape.d_model
    beta = shape.n_heads * (shape.d_model + 1)
    return shape.n_layers * (low_rank + convolution + beta)


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal, gates=None):
    naive = third_party_file("fla", "ops/path_attn/naive.py")
    low = x @ parameters[f"down.{layer}.weight"].T @ parameters[f"up.{layer}.weight"].T
    taps = parameters[f"convolution.{layer}.weight"][:, 0]  # (D, 3), the last for the token itself
    w = []
    for t in range(x.shape[1]):
        mixed = sum(low[:, t - back] * taps[:, 2 - back] for back in range(3) if t >= back)
        mixed = mixed * torch.sigmoid(mixed) if options["silu"] else mixed
        heads = mixed.view(-1, shape.n_heads, shape.head_dim)
        w.append(heads / heads.norm(dim=-1, keepdim=True))
    beta = 2 * torch.sigmoid(x @ parameters[f"beta.{layer}.weight"].T + parameters[f"beta.{layer}.bias"])
    output = naive.naive_path_attn(
        *(part.transpose(1, 2) for part in (q, k, v)),
        w=torch.stack(w, dim=1),
        beta=beta,
        g=torch.zeros_like(beta) if gates is None else gates,
        scale=shape.head_dim**-0.5,
    )
    return {"output": output.transpose(1, 2)}
