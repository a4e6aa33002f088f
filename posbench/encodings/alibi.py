"""Penalties on distance with a fixed or learned slope per head: ALiBi, and BAM, which generalises it."""

import torch
from torch import Tensor, nn

from posbench.encodings.base import Encoding, Layer, Shape


class ALiBi(Encoding):
    """Attention with linear biases (ALiBi): a penalty that grows with distance, at a fixed slope per head.

        logits_ij = q_i·k_j / sqrt(d) - m_h · |i - j|,   m_h = 2^(-8h/H) for h = 1 .. H

    If H is no power of two, the nearest one below, c, gives c slopes, and every other slope of 2c heads the rest.

    Source: Press, Smith and Lewis, "Train Short, Test Long" (2021), arXiv:2108.12409, section 3.
    Beyond training length: defined everywhere; far keys get ever less weight, and loss usually stays flat.
    Checked against: transformers BLOOM (causal) and x-transformers AlibiPositionalBias.
    """

    slopes: Tensor

    def __init__(self, shape: Shape, slopes: list[float] | None = None) -> None:
        super().__init__(shape)
        chosen = default_slopes(shape.n_heads) if slopes is None else slopes
        self.expect(len(chosen) == shape.n_heads, "slopes", slopes, f"{shape.n_heads} numbers, one per head")
        self.register_buffer("slopes", torch.tensor(chosen, dtype=torch.float32), persistent=False)

    def distance_bias(self, distance: Tensor, layer: Layer) -> Tensor:
        return -by_head(self.slopes, distance) * distance.abs()

    def key_bias(self, layer: Layer) -> Tensor | None:
        if not layer.consecutive:  # else distances may be clamped, which no number per key says
            return None
        return self.slopes[:, None] * (layer.positions - layer.positions[:, -1:])[:, None]


def default_slopes(n_heads: int) -> list[float]:
    """Return the authors' slopes for any number of heads."""
    c = 1 << (n_heads.bit_length() - 1)  # largest power of two up to n_heads
    regular = [2 ** (-8 * h / c) for h in range(1, c + 1)]
    return regular + [2 ** (-4 * h / c) for h in range(1, 2 * c + 1, 2)][: n_heads - c]


def by_head(numbers: Tensor, distance: Tensor) -> Tensor:
    """Return numbers per head (H,) as (H, 1, ..., 1), which broadcasts with distances (*S) to (H, *S)."""
    return numbers.view(-1, *[1] * distance.dim())


class BAM(Encoding):
    """Bayesian attention mechanism (BAM): a prior over distances whose shape each head and layer learns.

        logits_ij = q_i·k_j / sqrt(d) - exp(a)·(|j - i - mu| + 1e-5)^b,   mu = 2·sinh(m)

    b = 1, the start, is ALiBi, b = 0 is no bias; with b < 0 a head ignores its neighbourhood. m is 0 unless `location`
    lets heads learn it. `ssmax` multiplies query i's logits, bias included, by s·ln(i + 1), s learned from 1.

    Source: Bianchessi et al., "Bayesian Attention Mechanism: A Probabilistic Framework for Positional Encoding and
    Context Length Extrapolation" (2025), arXiv:2505.22842; in the authors' code layers share a prior and m is learned.
    Beyond training length: defined everywhere; where b < 1, far keys fade less and less.
    Checked against: plain loops from the authors' equation.
    """

    def __init__(self, shape: Shape, location: bool = False, ssmax: bool = False) -> None:
        super().__init__(shape)
        size = shape.n_layers, shape.n_heads
        self.scale = nn.Parameter(torch.tensor(default_slopes(shape.n_heads)).log().repeat(shape.n_layers, 1))
        self.exponent = nn.Parameter(torch.ones(size))
        self.location = nn.Parameter(torch.zeros(size)) if location else None
        self.sharpness = nn.Parameter(torch.ones(size)) if ssmax else None
        vars(self)["overridden"] = self.overridden - (set() if ssmax else {"scores"})

    def distance_bias(self, distance: Tensor, layer: Layer) -> Tensor:
        scale, exponent = (by_head(part[layer.index], distance) for part in (self.scale, self.exponent))
        if self.location is not None:
            distance = distance + 2 * by_head(self.location[layer.index].sinh(), distance)
        return -scale.exp() * (distance.abs() + 1e-5) ** exponent  # a power that may be negative

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        if self.sharpness is None:
            return logits
        seen = torch.arange(layer.rows.start + 1, layer.rows.start + 1 + q.shape[2], device=q.device)
        return logits * self.sharpness[layer.index][:, None, None] * seen[:, None].log()
