"""GRAPE-A: a penalty linear in distance, at a slope that keys or queries gate.

    logits_ij = q_i·k_j / sqrt(d) - |i - j| · m_h · softplus(ω_h) · G_ij,   m_h ALiBi's slopes
    G_ij = softplus(u_h·k_j / sqrt(d)),   softplus(v_h·q_i / sqrt(d))   or the sum of both

u and v are normalised to length 1, and softplus(ω) starts at 1.

Source: Zhang et al., "Group Representational Position Encoding" (2025), arXiv:2512.07805, as the authors' code has it
(model-architectures/GRAPE: grape-a-keygated, -querygated, -querykeygated), without its norm of q and k.
Beyond training length: defined everywhere; far keys get ever less weight unless gates close, as with ALiBi.
Checked against: plain loops from the equation.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings.alibi import default_slopes
from posbench.encodings.base import Encoding, Layer, Shape


class GrapeA(Encoding):
    name = "grape_a"
    slopes: Tensor

    def __init__(self, shape: Shape, gate: Literal["key", "query", "both"] = "key") -> None:
        super().__init__(shape)
        self.register_buffer("slopes", torch.tensor(default_slopes(shape.n_heads)), persistent=False)
        self.strength = nn.Parameter(torch.full((shape.n_layers, shape.n_heads), math.log(math.e - 1)))  # softplus 1
        size = shape.n_layers, shape.n_heads, shape.head_dim
        self.query = nn.Parameter(torch.randn(size) * shape.head_dim**-0.5) if gate != "key" else None
        self.key = nn.Parameter(torch.randn(size) * shape.head_dim**-0.5) if gate != "query" else None

    def prepare(self, q: Tensor, k: Tensor, layer: Layer) -> list[Tensor]:
        """Return the slopes that queries and keys give, (B, H, T) each."""
        slopes = (self.slopes * F.softplus(self.strength[layer.index]))[:, None]

        def gated(x: Tensor, directions: Tensor | None) -> Tensor:
            if directions is None:
                return x.new_zeros(x.shape[:-1])
            along = F.normalize(directions[layer.index], dim=-1)[..., None]
            return slopes * F.softplus((x @ along).squeeze(-1) * self.shape.head_dim**-0.5)

        return [gated(q, self.query), gated(k, self.key)]

    def bias(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        queries, keys = layer.state
        slopes = queries[:, :, layer.rows, None] + keys[:, :, None, layer.keys]
        return -layer.distance[:, None].abs() * slopes
