"""Contextual position encoding (CoPE): positions count only the tokens that matter, by a gate for each pair.

    g_ij = sigmoid(z_ij),  z_ij = q_i·k_j / sqrt(d)         p_ij = sum over t = j .. i of g_it, at most P - 1
    logits_ij = z_ij + (1 - w)·q_i·e[floor p_ij] + w·q_i·e[ceil p_ij],   w = p_ij - floor p_ij

The P vectors e start at zero, are shared by the heads and separate per layer. Order is that of the tokens.

Source: Golovneva et al., "Contextual Position Encoding: Learning to Count What's Important" (2024), arXiv:2405.18719.
Beyond training length: defined everywhere; counts beyond P - 1 are held there.
Checked against: x-transformers CoPE.
"""

from typing import Annotated

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor, nn

from posbench.encodings.base import Encoding, Layer, Shape


class CoPE(Encoding):
    def __init__(self, shape: Shape, max_position: Annotated[int, Ge(2)] = 64) -> None:
        super().__init__(shape)
        self.table = nn.Parameter(torch.zeros(shape.n_layers, max_position, shape.head_dim))

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        at_whole = q @ self.table[layer.index].mT  # (B, H, Tq, P), q unscaled as in the paper
        gates = logits.sigmoid() * layer.visible
        count = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=at_whole.shape[-1] - 1)
        below = count.long().clamp(min=0)  # NaN becomes a whole number below 0
        slope = F.pad(at_whole.diff(dim=-1), (0, 1)).gather(-1, below)  # none beyond the last
        return logits + at_whole.gather(-1, below) + count.frac() * slope
