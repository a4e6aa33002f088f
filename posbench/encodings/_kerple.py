"""Shared by KERPLE's kernels: two positive numbers per head, the same in all layers.

The authors' code resets a number below 0.01 to 0.01. Here such a number counts as 0.01 and still gets its gradient, so
that it can return.
"""

import math

import torch
from torch import Tensor, nn

from posbench.encodings.base import Encoding, Layer, Shape


class Kerple(Encoding):
    """Base of `kerple_log` and `kerple_power`, which differ in the kernel."""

    r2_most = math.inf

    def __init__(self, shape: Shape, r1_below: float, r2_below: float) -> None:
        """Draw r1 from 0 .. r1_below and r2 from 0 .. r2_below, uniformly."""
        super().__init__(shape)
        self.r1 = nn.Parameter(torch.rand(shape.n_heads) * r1_below)
        self.r2 = nn.Parameter(torch.rand(shape.n_heads) * r2_below)

    def kernel(self, distance: Tensor, r2: Tensor) -> Tensor:
        """The factor of r1, from distances (*S) of at least 0 and r2 (H, 1, ...): (H, *S)."""
        raise NotImplementedError

    def distance_bias(self, distance: Tensor, layer: Layer) -> Tensor:
        heads = -1, *(1,) * distance.dim()
        r1, r2 = _held(self.r1, math.inf).view(heads), _held(self.r2, self.r2_most).view(heads)
        return -r1 * self.kernel(distance.abs().float(), r2)


def _held(numbers: Tensor, most: float) -> Tensor:
    """Numbers clamped to 0.01 .. `most`, with the gradients of the unclamped ones."""
    exact = numbers.float()
    return exact.clamp(0.01, most).detach() + (exact - exact.detach())
