"""Attention with a logarithmic bias: near words matter more, but nothing is ever out of
sight.

    logits_ij = q_i·k_j / sqrt(d) - strength·ln(1 + |i - j|)

Source: Chi et al., "KERPLE: Kernelized Relative Positional Embedding for Length
Extrapolation" (2022), arXiv:2205.09921, section 4: the logarithmic kernel with r2 = 1
and one r1 for all heads, which is not learned.
Beyond training length: defined everywhere; what a doubled distance costs stays the
same, so loss usually stays flat.
Checked against: plain loops from the equation.
"""

from torch import Tensor

from posbench.encodings.base import Encoding, Layer, Shape
from posbench.options import Positive


class LogBias(Encoding):
    def __init__(self, shape: Shape, strength: Positive = 1.0) -> None:
        super().__init__(shape)
        self.strength = strength

    def distance_bias(self, distance: Tensor, layer: Layer) -> Tensor:
        # Keys of the future, which some tests let a query see, have negative distances.
        bias = -self.strength * distance.float().abs().log1p()
        return bias.expand(self.shape.n_heads, *distance.shape)
