"""Sines only: a continuous form of binary digits.

Each channel is a sine of the position, the first turning fastest, the last hardly at all:

    PE_ij = sin( i / base^(j/d) ),  j = 0 .. d - 1,        x'_i = x_i + s·PE_i    or    [x_i ; s·PE_i]

The exponent grows with every channel, not with every pair. Position 0 is the zero vector. The code is bounded,
distinct, continuous and independent of the length of the text. But sin(n + k) is not a linear function of sin(n) alone,
so no fixed linear map moves the code by k. `sinusoidal` adds a cosine to each sine, which repairs that.

Source: the step before Vaswani et al. (2017), arXiv:1706.03762, as tutorials lead to it; no paper of its own.
Beyond training length: defined everywhere; slow channels reach values unseen in training.
Checked against: math.sin in a plain loop.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from posbench.encodings import _rotary as rotary
from posbench.encodings._additive import Additive
from posbench.encodings.base import Shape


class Sine(Additive):
    def __init__(
        self,
        shape: Shape,
        base: float = 10000.0,
        combine: Literal["add", "concat"] = "add",
        scale: Literal["token"] | float = "token",
    ) -> None:
        super().__init__(shape, combine, scale)
        self.expect(1 < base < math.inf, "base", base, "a number above 1")
        self.base = base

    def code(self, positions: Tensor) -> Tensor:
        channel = torch.arange(self.width, dtype=torch.float64, device=rotary.has_fp64(positions.device))
        inv_freq = self.base ** (-channel / self.width)
        return rotary.angles(positions, inv_freq).sin().float().to(positions.device)
