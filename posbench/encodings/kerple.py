"""KERPLE: penalties by a kernel of distance, whose two positive numbers each head learns."""

import math

import torch
from torch import Tensor, nn

from posbench.encodings.alibi import by_head
from posbench.encodings.base import Encoding, Layer, Shape


class KerpleLog(Encoding):
    """KERPLE with the logarithmic kernel: each head learns the size and the scale of its penalty.

        logits_ij = q_i·k_j / sqrt(d) - r1_h · ln(1 + r2_h · |i - j|),   r1, r2 ≥ 0.01

    r1 starts uniform in 0 .. 2, r2 in 0 .. 1; layers share both. Below 0.01 they count as 0.01 and still get gradients.

    Source: Chi et al., "KERPLE: Kernelized Relative Positional Embedding for Length Extrapolation" (2022),
    arXiv:2205.09921, section 4; starting values and the lower bound from the authors' code (chijames/KERPLE).
    Beyond training length: defined everywhere; what a doubled distance costs is constant, and loss usually stays flat.
    Checked against: plain loops from the paper's equation.
    """

    name = "kerple_log"
    starts = 2.0, 1.0  # below which r1 and r2 are drawn
    most = math.inf, math.inf  # what r1 and r2 count as at most

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.r1, self.r2 = (nn.Parameter(torch.rand(shape.n_heads) * below) for below in self.starts)

    def distance_bias(self, distance: Tensor, layer: Layer) -> Tensor:
        pairs = zip((self.r1, self.r2), self.most, strict=True)
        r1, r2 = (by_head(r.clamp(0.01, most).detach() + (r - r.detach()), distance) for r, most in pairs)
        return -r1 * self.kernel(distance.abs(), r2)

    def kernel(self, distance: Tensor, r2: Tensor) -> Tensor:
        return (r2 * distance).log1p()


class KerplePower(KerpleLog):
    """KERPLE with the power kernel: each head learns a slope and an exponent. With exponent 1 it is ALiBi.

        logits_ij = q_i·k_j / sqrt(d) - r1_h · |i - j|^(r2_h),   r1 ≥ 0.01,  0.01 ≤ r2 ≤ 2

    r1 starts uniform in 0 .. 1 and r2 in 0 .. 2. Both are shared by all layers, and bounded as in `kerple_log`.

    Source: Chi et al. (2022), arXiv:2205.09921, section 4; starting values and bounds from the authors' code.
    Beyond training length: defined everywhere; far keys get ever less weight, as with ALiBi.
    Checked against: plain loops from the paper's equation; ALiBi, where the exponent is 1.
    """

    name = "kerple_power"
    starts = 1.0, 2.0
    most = math.inf, 2.0

    def kernel(self, distance: Tensor, r2: Tensor) -> Tensor:
        return distance**r2
