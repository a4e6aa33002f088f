"""The paper's definition: torch's matrix exponential of the generator times each position."""

import torch

from oracles._skew import moved

CASES = [{}, {"per_head": False}, {"block": 4}]
DTYPE = torch.float64
GRAPH_BREAKS = "looks at the positions' values, to know how many binary digits they have"


def parameter_count(shape, options):
    heads = shape.n_heads if options["per_head"] else 1
    return shape.n_layers * heads * shape.head_dim * ((options["block"] or shape.head_dim) - 1) // 2


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    return moved(parameters["above"][layer], shape, q, k, positions)
