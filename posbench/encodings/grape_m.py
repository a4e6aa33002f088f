"""Multiplicative GRAPE with commuting planes: RoPE whose frequencies each layer learns for itself.

A position acts on queries and keys as exp(n·L) with a skew-symmetric generator L. Here L turns the same planes as RoPE,
pairs of channels, at learned speeds:

    f_p = base^(-2p/d) · exp(alpha_lp / c),   alpha_lp = 0 at first, for layer l and pair p

It starts as RoPE. The divisor c makes the optimizer's steps on log frequencies c times smaller. The authors' code
learns c·ln f_p itself, which shifts the parameter only, and turns the other way round. That changes the logits of given
q and k, but not what can be learned: with one channel of each pair negated, they are the same. Their norm of queries
and keys is left out.

Source: Zhang et al., "Group Representational Position Encoding" (2025), arXiv:2512.07805, section 3, without the planes
that are learned; c is that of the authors' code.
Beyond training length: defined everywhere; slow pairs reach angles never seen in training and loss usually rises. An
extension stretches the frequencies of the base, and each layer keeps its factors.
Checked against: the exponential of the generator, by torch.linalg.matrix_exp.
"""

import math

import torch
from torch import Tensor, nn

from posbench.encodings import _rotary as rotary
from posbench.encodings.base import Layer, Shape


class GRAPEM(rotary.Rotary):
    name = "grape_m"

    def __init__(
        self, shape: Shape, base: float = 10000.0, layout: rotary.Layout = "interleaved", divisor: float = 16.0
    ) -> None:
        super().__init__(shape, base, layout)
        self.expect(0 < divisor < math.inf, "divisor", divisor, "a number above 0")
        self.divisor = divisor
        self.alpha = nn.Parameter(torch.zeros(shape.n_layers, shape.head_dim // 2))

    def make_tables(self, positions: Tensor) -> Tensor:
        return self.angles(positions)

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        angles = layer.tables
        factors = (self.alpha[layer.index].to(angles.device).double() / self.divisor).exp()
        made = rotary.laid_out(rotary.turns(angles * factors, q.device) * self.attention_factor, self.layout)
        return rotary.turn(q, made), rotary.turn(k, made)
