"""Sandwich: the inner product of sinusoidal positions, as a bias.

Of the products that sinusoidal positions bring into the logits, that of position with position is kept:

    logits_ij = q_i·k_j / sqrt(d) + H / (8h) · sum_{p < D/2} cos((i - j) · 10000^(-2p/D)),   h = 1 .. H

D is the option `width`. The sum falls roughly with the logarithm of distance, until the slowest waves turn.

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
        self.width = width
        heads = torch.arange(1, shape.n_heads + 1, dtype=torch.float32)
        self.register_buffer("strength", shape.n_heads / (8 * heads), persistent=False)

    def distance_bias(self, distance: Tensor, layer: Layer) -> Tensor:
        frequencies = rotary.frequencies(self.width, 10000.0)
        parts = [rotary.angles(some, frequencies).cos().sum(-1) for some in torch.split(distance.flatten(), AT_ONCE)]
        total = torch.cat(parts).float().to(distance.device).view(distance.shape)
        return by_head(self.strength, distance) * total
