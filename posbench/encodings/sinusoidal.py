"""Sinusoidal positions of the original transformer.

A clock with d/2 hands, the first fast and the last slow. Sine and cosine of each are added to the token embeddings:

    PE[i, 2p] = sin(i·θ_p),   PE[i, 2p+1] = cos(i·θ_p),   θ_p = base^(-2p/d)

A step of k positions turns every hand by a fixed angle, so PE[i+k] is one matrix times PE[i] for all i. The dot product
of two codes depends on their distance only, and every code has the length sqrt(d/2). Some codebases lay all sines
before all cosines (`layout: halves`), a fixed permutation of the same channels.

Source: Vaswani et al., "Attention Is All You Need" (2017), arXiv:1706.03762, section 3.5.
Beyond training length: defined everywhere; combinations of the slow hands are unseen there and loss usually rises.
Checked against: transformers DistilBERT (interleaved) and Marian (halves).
"""

import math
from typing import Literal

import torch
from torch import Tensor

from posbench.encodings import _rotary as rotary
from posbench.encodings._additive import Additive
from posbench.encodings.base import Shape
from posbench.errors import UserError


class Sinusoidal(Additive):
    def __init__(
        self,
        shape: Shape,
        base: float = 10000.0,
        layout: Literal["interleaved", "halves"] = "interleaved",
        combine: Literal["add", "concat"] = "add",
        scale: Literal["token"] | float = "token",
    ) -> None:
        super().__init__(shape, combine, scale)
        self.expect(1 < base < math.inf, "base", base, "a number above 1")
        if self.width % 2:
            raise UserError(
                f"d_model is {shape.d_model}: sinusoidal pairs a cosine with every sine and needs an even width for "
                f"its code, here {self.width} (combine: {combine})"
            )
        self.base = base
        self.layout = layout

    def code(self, positions: Tensor) -> Tensor:
        angles = rotary.angles(positions, rotary.frequencies(self.width, self.base, positions.device))
        hands = torch.stack((angles.sin(), angles.cos()), dim=-1 if self.layout == "interleaved" else -2)
        return hands.flatten(-2).float().to(positions.device)
