"""ComRoPE, for text: learned rotations of small blocks of channels.

    q'_n = exp(n·A / L) q_n,   k'_n = exp(n·A / L) k_n,   A = diag(P_1 - P_1', P_2 - P_2' ...)

with square blocks of b channels, learned per layer and head. The paper asks which matrices of several axes commute, as
rotations by position must. Text has one axis, whose matrix commutes with itself: both of the paper's answers become the
formula above. With b = 2, the authors' default, this is RoPE with frequencies learned per head. With b as wide as the
head it is LieRE with other initial values. P starts normal with `std`; only the half of P - P' above the diagonal is
stored. Positions are in training lengths L, the authors' in lengths of an image.

An image has 14 patches along an axis. If one token should initially turn as far as one patch, set `std` to about L /
14.

Source: Yu et al., "ComRoPE: Scalable and Robust Rotary Position Embedding Parameterized by Trainable Commuting Angle
Matrices" (2025), arXiv:2506.03737, and the authors' code, in one dimension.
Beyond training length: defined everywhere; slow planes reach angles never seen in training.
Checked against: torch's matrix exponential at each position.
"""

import math

import torch

from posbench.encodings._skew import Skew
from posbench.encodings.base import Shape


class ComRoPE(Skew):
    def __init__(self, shape: Shape, block: int = 2, std: float = 1.0) -> None:
        super().__init__(shape, max(1, block), shape.n_heads)
        fits = block >= 2 and shape.head_dim % block == 0
        self.expect(fits, "block", block, f"a divisor of the {shape.head_dim} channels of a head, at least 2")
        self.expect(0 < std < math.inf, "std", std, "a number above 0")
        with torch.no_grad():
            self.above.normal_(0, math.sqrt(2) * std)  # the deviation of a difference of two entries of P
