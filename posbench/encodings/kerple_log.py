"""KERPLE with the logarithmic kernel.

A penalty that grows with the logarithm of distance; each head learns its size and its scale:

    logits_ij = q_i·k_j / sqrt(d) - r1_h · ln(1 + r2_h · |i - j|),   r1, r2 ≥ 0.01

A softmax over such logits weighs keys by a power of their distance, (1 + r2·|i - j|)^(-r1): heads with a small r1 see
far back. r1 starts uniform in 0 .. 2 and r2 in 0 .. 1. Both are shared by all layers, as in the authors' code.

Source: Chi et al., "KERPLE: Kernelized Relative Positional Embedding for Length Extrapolation" (2022),
arXiv:2205.09921, section 4; starting values and the lower bound from the authors' code (chijames/KERPLE).
Beyond training length: defined everywhere; what a doubled distance costs stays the same, so loss usually stays flat.
Checked against: plain loops from the paper's equation.
"""

from torch import Tensor

from posbench.encodings._kerple import Kerple
from posbench.encodings.base import Shape


class KerpleLog(Kerple):
    name = "kerple_log"

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, r1_below=2.0, r2_below=1.0)

    def kernel(self, distance: Tensor, r2: Tensor) -> Tensor:
        return (r2 * distance).log1p()
