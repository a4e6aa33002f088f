"""p-RoPE, also called proportional RoPE.

RoPE whose slowest pairs do not turn at all: they carry content without position at any distance. The fastest share of
the pairs keeps RoPE's frequencies:

    f_p = base^(-2p/d) for p < floor(fraction·d/2),   0 otherwise

Source: Barbero et al., "Round and Round We Go! What makes Rotary Positional Encodings useful?" (2024),
arXiv:2410.06205, section 6, where 0.75 did best.
Beyond training length: defined everywhere; the pairs that would reach unseen angles are fewer than RoPE's.
Checked against: transformers, rope_type `proportional` (Gemma 4).
"""

import torch

from posbench.encodings import _rotary as rotary
from posbench.encodings.base import Shape


class PRoPE(rotary.PureRotary):
    name = "p_rope"

    def __init__(
        self, shape: Shape, base: float = 10000.0, layout: rotary.Layout = "interleaved", fraction: float = 0.75
    ) -> None:
        super().__init__(shape, base, layout)
        self.expect(0 <= fraction <= 1, "fraction", fraction, "a number from 0 to 1")
        self.fraction = fraction
        inv_freq = self.inv_freq(torch.device("cpu"))
        inv_freq[int(fraction * shape.head_dim // 2) :] = 0
        self.stretched = inv_freq
