"""Plain loops from the paper's equation for the bias, fla-core's forgetting attention with turned signs for the causal
output."""

import torch

from oracles import fox
from oracles.fox import parameter_count, reads_positions

CASES = [{}, {"gate_bias": -2.0}]


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    weight, offset = parameters["weight"][layer], parameters["gate_bias"][layer]
    lengths = torch.log(1 + torch.exp(torch.einsum("btd,hd->bht", x, weight) + offset[:, None]))
    rows = []
    for i in range(x.shape[1]):
        # Keys after the query, visible only without a mask, are brought nearer by what lies between.
        row = [lengths[..., i + 1 : j + 1].sum(-1) - lengths[..., j + 1 : i + 1].sum(-1) for j in range(x.shape[1])]
        rows.append(torch.stack(row, dim=-1))
    turned = {name: -value for name, value in parameters.items()}
    return fox.reference(turned, shape, options, q, k, v, x, positions, layer, causal) | {"bias": torch.stack(rows, 2)}
