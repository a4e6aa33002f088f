"""Polar coordinate position embedding (PoPE): magnitude holds content, angle holds position.

RoPE's logits mix content and position, since each pair of channels has an angle before it is turned. Here every channel
c of a head is one complex number. Its magnitude comes from the content, its angle from the position alone; keys add a
learned phase per head:

    logits_ij = sum over c of softplus(q_ic)·softplus(k_jc)·cos((i - j)·base^(-c/d) - phase_c) / sqrt(d)

So there are d frequencies, twice as many as in RoPE, and q and k are twice as wide inside attention. Phases are clamped
to [-2π, 0]; outside these bounds a phase gets no gradient.

Source: Gopalakrishnan et al., "Decoupling the 'What' and 'Where' With Polar Coordinate Positional Embeddings" (2025),
arXiv:2509.10534.
Beyond training length: defined everywhere; slow channels reach angles never seen in training, though, as the authors
report, loss rises less than RoPE's.
Checked against: x-transformers PolarEmbedding.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings import _rotary as rotary
from posbench.encodings.base import Layer, Shape

PhaseInit = Literal["zero", "uniform"]


class PoPE(rotary.Rotary):
    def __init__(self, shape: Shape, base: float = 10000.0, phase_init: PhaseInit = "zero") -> None:
        super().__init__(shape, base)
        start = torch.zeros(shape.n_layers, shape.n_heads, shape.head_dim)
        self.phase = nn.Parameter(start if phase_init == "zero" else start.uniform_(-2 * math.pi, 0))

    @property
    def width(self) -> int:
        return 2 * self.shape.head_dim

    def make_tables(self, positions: Tensor) -> Tensor:
        return self.rotation(positions, positions.device)

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        made = layer.tables  # (1|B, 1, T, Dh)
        phase = self.phase[layer.index].float().clamp(-2 * math.pi, 0)
        of_keys = made * torch.polar(torch.ones_like(phase), phase)[:, None]
        return _placed(q, made), _placed(k, of_keys)


def _placed(a: Tensor, turns: Tensor) -> Tensor:
    """Magnitudes (B, H, T, Dh) times complex directions (1|B, 1|H, T, Dh), as real channels: (B, H, T, 2 Dh)."""
    size = F.softplus(a.float())
    return torch.cat((size * turns.real, size * turns.imag), dim=-1).to(a.dtype)
