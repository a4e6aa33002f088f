"""Shared by KERPLE's kernels: two positive numbers per head, the same in all layers.

The authors' code sets a number that training drove below 0.01 back to it; here it counts as 0.01 and its gradient
passes, so that it can return.
"""

import math

import torch
from torch import Tensor, nn

from posbench.encodings.base import Encoding, Shape


class Kerple(Encoding):
    """Base of `kerple_log` and `kerple_power`, which differ in the kernel."""

    r2_most = math.inf

    def __init__(self, shape: Shape, r1_below: float, r2_below: float) -> None:
        """Draw r1 and r2 uniformly between 0 and these numbers."""
        super().__init__(shape)
        self.r1 = nn.Parameter(torch.rand(shape.n_heads) * r1_below)
        self.r2 = nn.Parameter(torch.rand(shape.n_heads) * r2_below)

    def kernel(self, distance: Tensor, r2: Tensor) -> Tensor:
        """The factor of r1, from distances (*S) of at least 0 and r2 (H, 1, ...): (H, *S)."""
        raise NotImplementedError

    def distance_bias(self, distance: Tensor, layer: int) -> Tensor:
        heads = -1, *(1,) * distance.dim()
        r1, r2 = _held(self.r1, math.inf).view(heads), _held(self.r2, self.r2_most).view(heads)
        return -r1 * self.kernel(distance.abs().float(), r2)


def _held(numbers: Tensor, most: float) -> Tensor:
    """Numbers held between 0.01 and `most`, with gradients as if they were not."""
    exact = numbers.float()
    return exact.clamp(0.01, most).detach() + (exact - exact.detach())
