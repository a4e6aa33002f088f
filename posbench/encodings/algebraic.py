"""Algebraic positional encodings, for sequences: position n is the n-th power of one learned orthogonal matrix.

    q'_n = W^n q_n,   k'_n = W^n k_n,   W = exp(P - P'),   so that  q'_m·k'_n = q_m·W^(n-m) k_n
    logits_mn = decay^|m-n| · q'_m·k'_n / sqrt(d)

A path of n steps is n times one step, and the way back is the transpose: W turns paths between positions into products
of matrices. It turns d/2 planes of some orthogonal basis. So this is RoPE in a learned basis at learned speeds, as in
LieRE, but with steps of a token, one W per head for all layers, and RoPE as its start. Only the half of P - P' above
the diagonal is stored.

The authors multiply logits by 0.98 per token of distance, which favours near keys while logits are positive. Far keys
have logits of about 0, whatever they contain. `decay: 1` leaves this out and has faster kernels.

Source: Kogkalidis, Bernardy and Garg, "Algebraic Positional Encodings" (2023), arXiv:2312.16045, sections 3.1 and 4,
and the authors' code (konstantinosKokos/ape). In the paper W starts as RoPE's rotation, as here. In the code every
second pair has the speed of the pair before it, and all turn the other way round.
Beyond training length: defined everywhere; slow planes reach angles never seen in training.
Checked against: torch's matrix power of its matrix exponential, in plain loops; by hand, also the authors' code.
"""

import math

import torch
from torch import Tensor

from posbench.encodings import _rotary as rotary
from posbench.encodings._skew import Skew
from posbench.encodings.base import Layer, Shape


class Algebraic(Skew):
    def __init__(self, shape: Shape, base: float = 10000.0, decay: float = 0.98) -> None:
        rotary.check_pairs(self.name, shape)
        super().__init__(shape, shape.head_dim, shape.n_heads, unit=1, one_for_all_layers=True)
        self.expect(1 < base < math.inf, "base", base, "a number above 1")
        self.expect(0 < decay <= 1, "decay", decay, "a number above 0, at most 1")
        self.decay = decay
        row, column = torch.triu_indices(shape.head_dim, shape.head_dim, 1)
        speeds = rotary.frequencies(shape.head_dim, base, self.above.device)[row // 2]
        with torch.no_grad():  # above the diagonal, where a rotation has -sin
            self.above.copy_(torch.where((row % 2 == 0) & (column == row + 1), -speeds, 0.0))

    @property
    def hooks(self) -> frozenset[str]:
        return self.overridden if self.decay < 1 else self.overridden - {"scores"}

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        return logits * (self.decay ** layer.distance.abs().float())[:, None]
