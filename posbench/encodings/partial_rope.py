"""Partial rotary embedding.

RoPE on the first channels of each head only; the others carry no position at all, so a head can match contents
wherever they stand. The frequencies are those of a head as wide as the rotated part:

    f_p = base^(-2p/r),   r = fraction·d rotated channels

Source: Wang and Komatsuzaki, "GPT-J-6B" (2021); Black et al., "GPT-NeoX-20B" (2022), arXiv:2204.06745, section 2.1
(a quarter of the channels).
Beyond training length: defined everywhere; slow pairs reach angles never seen in training and loss usually rises.
Checked against: transformers GPT-NeoX (half) and GPT-J (interleaved).
"""

from posbench.encodings import _rotary as rotary
from posbench.encodings.base import Shape


class PartialRoPE(rotary.PureRotary):
    def __init__(
        self, shape: Shape, base: float = 10000.0, layout: rotary.Layout = "interleaved", fraction: float = 0.25
    ) -> None:
        super().__init__(shape, base, layout)
        self.fraction = fraction
        even = 0 <= fraction <= 1 and self.width % 2 == 0
        self.expect(even, "fraction", fraction, f"a share from 0 to 1 of {shape.head_dim} channels that is even")

    @property
    def width(self) -> int:
        return int(self.fraction * self.shape.head_dim)
