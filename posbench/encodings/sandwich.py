"""Sandwich: the inner product of sinusoidal positions, as a bias.

    logits_ij = q_i·k_j / sqrt(d) + H / (8h) · sum_{p < D/2} cos((i - j) · 10000^(-2p/D)),   h = 1 .. H, D = `width`

Source: Chi et al., "Dissecting Transformer Length Extrapolation via the Lens of Receptive Field Analysis" (2022),
arXiv:2212.10356, appendix E, as meta-pytorch/attention-gym has it: waves are counted from p = 0.
Beyond training length: defined everywhere; it falls slowly with distance, and loss usually stays flat.
Checked against: plain loops, and the inner products of transformers DistilBERT's sinusoidal positions.
"""

import torch
from torch import Tensor

from posbench.encodings import rope as rotary
from posbench.encodings.alibi import by_head
from posbench.encodings.base import Encoding, Layer, Shape

AT_ONCE = 2**16  # distances, whose angles take D/2 fp64 numbers each


class Sandwich(Encoding):
    strength: Tensor

    def __init__(self, shape: Shape, width: int = 128) -> None:
        super().__init__(shape)
        self.expect(width >= 2 and width % 2 == 0, "width", width, "an even number of at least 2")
        self.frequencies = rotary.frequencies(width, 10000.0)
        strength = shape.n_heads / (8 * torch.arange(1, shape.n_heads + 1, dtype=torch.float32))
        self.register_buffer("strength", strength, persistent=False)

    def distance_bias(self, distance: Tensor, layer: Layer) -> Tensor:
        parts = torch.split(distance.flatten(), AT_ONCE)
        total = torch.cat([rotary.angles(part, self.frequencies).cos().sum(-1) for part in parts])
        return by_head(self.strength, distance) * total.float().to(distance.device).view(distance.shape)
