"""Partial rotary embedding.

RoPE on the first channels of each head only. The others carry no position, so a head can match contents anywhere. The
frequencies are those of a head as wide as the rotated part:

    f_p = base^(-2p/r),   r = fraction·d rotated channels

Source: Wang and Komatsuzaki, "GPT-J-6B" (2021); Black et al., "GPT-NeoX-20B" (2022), arXiv:2204.06745, section 2.1
(a quarter of the channels).
Beyond training length: defined everywhere; slow pairs reach angles never seen in training and loss usually rises.
Checked against: transformers GPT-NeoX (half) and GPT-J (interleaved).
"""

from posbench.encodings import _rotary as rotary
from posbench.encodings.base import Shape


class PartialRoPE(rotary.PureRotary):
    name = "partial_rope"

    def __init__(
        self, shape: Shape, base: float = 10000.0, layout: rotary.Layout = "interleaved", fraction: float = 0.25
    ) -> None:
        super().__init__(shape, base, layout)
        self.fraction = fraction
        even = 0 <= fraction <= 1 and self.width % 2 == 0
        self.expect(even, "fraction", fraction, f"0 to 1, for an even number of the {shape.head_dim} channels")

    @property
    def width(self) -> int:
        return int(self.fraction * self.shape.head_dim)
