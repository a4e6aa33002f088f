"""Wall attention: the plain form in fla, whose two helpers are stood in for, since their package wants triton."""

import importlib.util
import math
import sys
import types
from unittest import mock

import torch
import torch.nn.functional as F

from oracles import third_party_file
from oracles.none import reads_positions

CASES = [{}, {"gate_bias": 0.0}]
CAUSAL = (True,)


def parameter_count(shape, options):
    return shape.n_layers * shape.n_heads * shape.head_dim * (shape.d_model + 1)


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    def summed(g, scale, cu_seqlens=None):
        return g.cumsum(1) * scale

    names = ("fla", "fla.ops", "fla.ops.utils", "fla.ops.utils.constant", "fla.ops.utils.cumsum")
    stand_ins = {name: types.ModuleType(name) for name in names}
    stand_ins["fla"].__spec__ = importlib.util.find_spec("fla")  # where the file is looked for
    stand_ins["fla.ops.utils.constant"].RCP_LN2 = 1 / math.log(2)
    stand_ins["fla.ops.utils.cumsum"].chunk_global_cumsum = summed
    with mock.patch.dict(sys.modules, stand_ins):
        naive = third_party_file("fla", "ops/wall_attn/naive.py")
    gates = F.logsigmoid(torch.einsum("btd,ed->bte", x, parameters["weight"][layer]) + parameters["gate_bias"][layer])
    gates = gates.unflatten(2, (shape.n_heads, shape.head_dim))
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    output = naive.naive_wall_attn(q, k, v, gates, scale=shape.head_dim**-0.5)
    return {"output": output.transpose(1, 2)}
