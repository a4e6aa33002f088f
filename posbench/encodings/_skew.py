"""Shared by encodings whose rotation is the exponential of a learned matrix.

Position n acts on queries and keys as exp(n·A / u), where u is the training length or 1, and A is skew-symmetric (A' =
-A) with square blocks along its diagonal. All exp(n·A / u) commute, so a logit depends on content and distance alone.

The exponential is never formed for each n. Blocks of two channels turn by an angle per step, as in RoPE. For wider
blocks, n is written in binary: a vector is multiplied by exp(2^b·A / u) for each digit b of n that is 1. Fractional
positions are refused, though the exponential exists there.
"""

import torch
from torch import Tensor, nn

from posbench.encodings import _rotary as rotary
from posbench.encodings.base import Encoding, Layer, Shape
from posbench.errors import UserError


class Skew(Encoding):
    """Base of these encodings; a subclass sets block width, who shares a matrix, and initial values."""

    whole_positions = True

    def __init__(
        self, shape: Shape, block: int, heads: int, unit: int | None = None, one_for_all_layers: bool = False
    ) -> None:
        """Make the generators, which are 0.

        Args:
            block: channels per block.
            heads: n_heads, or 1 if all heads share one matrix.
            unit: tokens by which A turns once; None = the training length.
            one_for_all_layers: whether all layers share the matrix; what is made of it is then made once.
        """
        super().__init__(shape)
        self.block, self.unit, self.one_for_all_layers = block, unit or shape.train_length, one_for_all_layers
        layers = 1 if one_for_all_layers else shape.n_layers
        size = (layers, heads, shape.head_dim // block, block * (block - 1) // 2)
        self.above = nn.Parameter(torch.zeros(size))  # the entries above each block's diagonal, row by row

    def make_tables(self, positions: Tensor) -> tuple[list[Tensor], list[Tensor] | None] | None:
        """Binary digits of the positions, and the steps of all layers if these share one matrix; None if unused."""
        if positions.is_floating_point():
            raise UserError(f"'{self.name}' counts steps: expected integer positions, got fractional ones")
        if self.block == 2:
            return None
        places = int(positions.max()).bit_length()
        steps = self._steps(0, places, positions.device) if self.one_for_all_layers else None
        return _digits(positions, places), steps

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        if self.block == 2:
            turns = self._turns(layer.positions, layer.index).to(q.device)
            return rotary.turn(q, (turns,)), rotary.turn(k, (turns,))
        digits, steps = layer.tables
        if steps is None:
            steps = self._steps(layer.index, len(digits), q.device)
        return self._moved(q, steps, digits), self._moved(k, steps, digits)

    def _turns(self, positions: Tensor, layer: int) -> Tensor:
        """The factors of blocks of two channels, as complex numbers: (1|B, 1|H, T, Dh/2) complex64."""
        steps = self._above(layer)[..., 0] / self.unit
        angles = -rotary.exact(positions)[:, None, :, None] * steps[:, None]
        return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)

    def _steps(self, layer: int, places: int, device: torch.device) -> list[Tensor]:
        """exp(2^b·A / u) for b = 0 .. places-1, by blocks: (1|H, N, b, b), each the square of the one before."""
        steps: list[Tensor] = []
        for _ in range(places):
            steps.append(steps[-1] @ steps[-1] if steps else torch.linalg.matrix_exp(self._generator(layer)))
        return [step.to(device, torch.float32) for step in steps]

    def _generator(self, layer: int) -> Tensor:
        """A / u by blocks: (1|H, N, b, b) fp64, on the device that makes the exponentials."""
        above = self._above(layer)
        row, column = torch.triu_indices(self.block, self.block, 1, device=above.device)
        generator = above.new_zeros(*above.shape[:-1], self.block, self.block)
        generator[..., row, column] = above
        return (generator - generator.mT) / self.unit

    def _above(self, layer: int) -> Tensor:
        """The entries above the diagonal in fp64, on a device that has it."""
        above = self.above[0 if self.one_for_all_layers else layer]
        return above.to(rotary.has_fp64(self.above.device)).double()

    def _moved(self, a: Tensor, steps: list[Tensor], digits: list[Tensor]) -> Tensor:
        """q or k (B, H, T, Dh), rotated to positions with these binary digits; steps are (1|H, N, b, b)."""
        blocks = a.float().reshape(*a.shape[:-1], -1, self.block).transpose(2, 3)  # (B, H, N, T, b)
        for step, one in zip(steps, digits, strict=True):
            blocks = torch.where(one, blocks @ step.mT, blocks)
        return blocks.transpose(2, 3).flatten(-2).to(a.dtype)


def _digits(positions: Tensor, places: int) -> list[Tensor]:
    """Per binary digit, lowest first: a mask (1|B, 1, 1, T, 1) of the positions (1|B, T) where it is 1."""
    return [(positions >> place & 1).bool()[:, None, None, :, None] for place in range(places)]
