"""KERPLE: penalties by a kernel of distance, whose two positive numbers each head learns."""

import math

import torch
from torch import Tensor, nn

from posbench.encodings.alibi import by_head
from posbench.encodings.base import Encoding, Layer, Shape


class KerpleLog(Encoding):
    """KERPLE with the logarithmic kernel.

    A penalty that grows with the logarithm of distance; each head learns its size and its scale:

        logits_ij = q_i·k_j / sqrt(d) - r1_h · ln(1 + r2_h · |i - j|),   r1, r2 ≥ 0.01

    A softmax over such logits weighs keys by a power of their distance, (1 + r2·|i - j|)^(-r1). r1 starts uniform in 0
    .. 2 and r2 in 0 .. 1. Both are shared by all layers, as in the authors' code, which resets a number below 0.01;
    here it counts as 0.01 and still gets its gradient, so that it can return.

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
        r1, r2 = (
            by_head(r.clamp(0.01, most).detach() + (r - r.detach()), distance)
            for r, most in zip((self.r1, self.r2), self.most, strict=True)
        )
        return -r1 * self.kernel(distance.abs(), r2)

    def kernel(self, distance: Tensor, r2: Tensor) -> Tensor:
        """Return the factor of r1 from distances (*S) of at least 0 and r2 (H, 1, ...): (H, *S)."""
        return (r2 * distance).log1p()


class KerplePower(KerpleLog):
    """KERPLE with the power kernel.

    A penalty that grows with a power of distance; each head learns a slope and an exponent:

        logits_ij = q_i·k_j / sqrt(d) - r1_h · |i - j|^(r2_h),   r1 ≥ 0.01,  0.01 ≤ r2 ≤ 2

    With exponent 1 it is ALiBi with learned slopes; with a small exponent, far keys get nearly the same penalty. r1
    starts uniform in 0 .. 1 and r2 in 0 .. 2. Both are shared by all layers, and bounded as in `kerple_log`.

    Source: Chi et al., "KERPLE: Kernelized Relative Positional Embedding for Length Extrapolation" (2022),
    arXiv:2205.09921, section 4; starting values and bounds from the authors' code (chijames/KERPLE).
    Beyond training length: defined everywhere; far keys get ever less weight, as with ALiBi.
    Checked against: plain loops from the paper's equation; ALiBi, where the exponent is 1.
    """

    name = "kerple_power"
    starts = 1.0, 2.0
    most = math.inf, 2.0

    def kernel(self, distance: Tensor, r2: Tensor) -> Tensor:
        return distance**r2
