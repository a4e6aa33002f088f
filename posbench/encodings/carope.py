"""Context-aware RoPE (CARoPE): each token sets, per head, the size of its step in position.

RoPE's angle of pair p is a sum of one step θ^p per token. Here every token has its own θ per head, computed from the
layer's input:

    angle_tp = sum over s = 0 .. t of θ_s^p,   θ_s = 1 / (1 + softplus(w_h·x_s + c)),   p = 0 .. d/2-1

The constant c is not learned: it makes θ = base^(-2/d) where w_h·x is 0. w starts at 0, which is RoPE. The paper has no
c; it starts as RoPE but does not say how. The first pair, p = 0, always turns by one radian per token. Order is that of
the tokens; position numbers are not used.

Source: Veisi et al., "Context-aware Rotary Position Embedding" (2025), arXiv:2507.23083, section 2.
Beyond training length: defined everywhere; sums reach angles never seen in training.
Checked against: plain loops from the paper; at its start it is RoPE.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings import _rotary as rotary
from posbench.encodings.base import Encoding, Layer, Shape


class CARoPE(Encoding):
    history = frozenset({"x"})

    def __init__(self, shape: Shape, base: float = 10000.0, layout: rotary.Layout = "interleaved") -> None:
        super().__init__(shape)
        self.expect(1 < base < math.inf, "base", base, "a number above 1")
        rotary.check_pairs(self.name, shape)
        self.layout: rotary.Layout = layout
        start = base ** (2 / shape.head_dim) - 1  # 1/θ - 1 where w·x is 0
        self.constant = start + math.log(-math.expm1(-start))  # the inverse of softplus
        self.step = nn.Parameter(torch.zeros(shape.n_layers, shape.n_heads, shape.d_model))

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        x = self.given(layer.x, "makes its angles from")
        asked = (x.float() @ self.step[layer.index].mT).mT.to(rotary.has_fp64(x.device))  # (B, H, T)
        # fp64, for sums over thousands of tokens
        steps = (1 + F.softplus(asked.double() + self.constant)).log()
        powers = torch.arange(self.shape.head_dim // 2, device=steps.device)
        angles = (-powers * steps[..., None]).exp().cumsum(2)  # (B, H, T, P)
        turns = torch.polar(torch.ones_like(angles), angles).to(torch.complex64).to(x.device)
        made = rotary.laid_out(turns, self.layout)
        return rotary.turn(q, made), rotary.turn(k, made)
