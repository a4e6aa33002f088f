"""Lie rotational position encoding (LieRE), for text: one learned rotation, applied once per token.

RoPE turns pairs of channels. Here all channels of a head turn together, in learned planes and at learned speeds:

    q'_n = exp(n·A / L) q_n,   k'_n = exp(n·A / L) k_n,   A' = -A

so that a logit is q_m' exp((n - m)·A / L) k_n. A skew-symmetric matrix turns d/2 planes of some orthogonal basis: this
is RoPE in a learned basis with learned frequencies, one A per layer and head, or one per layer (`per_head: false`). The
d(d-1)/2 numbers above the diagonal of A start uniform between 0 and 2π. Positions are in training lengths L, the
authors' in lengths of an image: L tokens have the angles of L patches, and longer texts go beyond these.

Source: Ostmeier et al., "LieRE: Lie Rotational Positional Encodings" (2024), arXiv:2406.10322, and the authors' code,
in one dimension. The paper's matrices are dense, as here; a matrix per layer and head is what its scripts for ImageNet
ask for. These also give A blocks of 8 channels along its diagonal (`block: 8`), which cost less and turn less freely.
Beyond training length: defined everywhere; slow planes reach angles never seen in training.
Checked against: torch's matrix exponential at each position.
"""

import math

import torch

from posbench.encodings._skew import Skew
from posbench.encodings.base import Shape


class LieRE(Skew):
    def __init__(self, shape: Shape, per_head: bool = True, block: int | None = None) -> None:
        super().__init__(shape, shape.head_dim if block is None else max(1, block), shape.n_heads if per_head else 1)
        fits = block is None or (block >= 2 and shape.head_dim % block == 0)
        expected = f"a divisor of the {shape.head_dim} channels of a head, at least 2, or null for all of them"
        self.expect(fits, "block", block, expected)
        with torch.no_grad():
            self.above.uniform_(0, 2 * math.pi)
