"""KERPLE with the power kernel.

A penalty that grows with a power of distance; each head learns a slope and an exponent:

    logits_ij = q_i·k_j / sqrt(d) - r1_h · |i - j|^(r2_h),   r1 ≥ 0.01,  0.01 ≤ r2 ≤ 2

With exponent 1 it is ALiBi with learned slopes; with a small exponent, far keys get nearly the same penalty. r1 starts
uniform in 0 .. 1 and r2 in 0 .. 2. Both are shared by all layers, as in the authors' code.

Source: Chi et al., "KERPLE: Kernelized Relative Positional Embedding for Length Extrapolation" (2022),
arXiv:2205.09921, section 4; starting values and bounds from the authors' code (chijames/KERPLE).
Beyond training length: defined everywhere; far keys get ever less weight, as with ALiBi.
Checked against: plain loops from the paper's equation; ALiBi, where the exponent is 1.
"""

from torch import Tensor

from posbench.encodings._kerple import Kerple
from posbench.encodings.base import Shape


class KerplePower(Kerple):
    name = "kerple_power"
    r2_most = 2.0

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, r1_below=1.0, r2_below=2.0)

    def kernel(self, distance: Tensor, r2: Tensor) -> Tensor:
        return distance**r2
