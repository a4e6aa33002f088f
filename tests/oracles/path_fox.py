"""PaTH with forget gates: the authors' plain form in fla."""

import torch
import torch.nn.functional as F

from oracles import path
from oracles.none import reads_positions

CASES = [{}, {"rank": 4, "silu": False, "gate_bias": 2.0}]
CAUSAL = (True,)


def parameter_count(shape, options):
    return path.parameter_count(shape, options) + shape.n_layers * shape.n_heads * (shape.d_model + 1)


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    gates = F.logsigmoid(torch.einsum("btd,hd->bth", x, parameters["gate"][layer]) + parameters["gate_bias"][layer])
    return path.reference(parameters, shape, options, q, k, v, x, positions, layer, causal, gates)
