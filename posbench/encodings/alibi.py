"""Attention with linear biases (ALiBi).

A penalty that grows linearly with distance, with a fixed slope per head:

    logits_ij = q_i·k_j / sqrt(d) - m_h · |i - j|,   m_h = 2^(-8h/H) for h = 1 .. H

Heads with steep slopes look at their neighbourhood, heads with flat ones far back. That rule needs H to be a power of
two. Otherwise, as in the authors' code, the nearest power of two c below H gives c slopes, and every other slope of 2c
heads gives the rest. Without a causal mask both sides are penalised alike, so ALiBi cannot tell left from right.

Source: Press, Smith and Lewis, "Train Short, Test Long" (2021), arXiv:2108.12409, section 3.
Beyond training length: defined everywhere; far keys get ever less weight, and loss usually stays flat.
Checked against: transformers BLOOM (causal) and x-transformers AlibiPositionalBias.
"""

import math

import torch
from torch import Tensor

from posbench.encodings.base import Encoding, Layer, Shape


class ALiBi(Encoding):
    slopes: Tensor

    def __init__(self, shape: Shape, slopes: list[float] | None = None) -> None:
        super().__init__(shape)
        chosen = default_slopes(shape.n_heads) if slopes is None else slopes
        fits = len(chosen) == shape.n_heads and all(math.isfinite(slope) for slope in chosen)
        self.expect(fits, "slopes", slopes, f"{shape.n_heads} finite numbers, one per head")
        self.register_buffer("slopes", torch.tensor(chosen, dtype=torch.float32), persistent=False)

    def distance_bias(self, distance: Tensor, layer: Layer) -> Tensor:
        slopes = self.slopes.view(-1, *(1,) * distance.dim())
        return -slopes * distance.abs().float()

    def key_bias(self, layer: Layer) -> Tensor | None:
        if not layer.consecutive:  # else distances may be clamped, which no number per key says
            return None
        return self.slopes[:, None] * (layer.positions - layer.positions[:, -1:]).float()[:, None]


def default_slopes(n_heads: int) -> list[float]:
    """The authors' slopes for any number of heads."""
    c = 1 << (n_heads.bit_length() - 1)  # largest power of two up to n_heads
    regular = [2 ** (-8 * h / c) for h in range(1, c + 1)]
    between = [2 ** (-8 * h / (2 * c)) for h in range(1, 2 * c + 1, 2)]
    return regular + between[: n_heads - c]
