"""What the encodings share whose rotation is the exponential of a learned matrix.

Position n acts on queries and keys as exp(n·A / L), with L the training length and A skew-symmetric (A' = -A), made of
square blocks along its diagonal. All exp(n·A / L) commute, so a logit depends on content and distance alone.

They are never formed for each n. Blocks of two channels turn by an angle per step, as in RoPE. For wider ones n is
taken in binary: exp(n·A / L) is the product of the exp(2^b·A / L) of its ones, and a vector passes through those: so
many products with one matrix as the largest position has digits. Fractional positions, at which the exponential exists
as well, are refused.
"""

import torch
from torch import Tensor, nn

from posbench.encodings import _rotary as rotary
from posbench.encodings.base import Encoding, Shape, on_host, once
from posbench.errors import UserError


class Skew(Encoding):
    """Base of these encodings; a subclass says how wide a block is, which heads have their own, and the start."""

    whole_positions = True

    def __init__(self, shape: Shape, block: int, heads: int) -> None:
        """`block` channels make a block; `heads` is n_heads, or 1 where they share one matrix."""
        super().__init__(shape)
        self.block = block
        size = (shape.n_layers, heads, shape.head_dim // block, block * (block - 1) // 2)
        self.above = nn.Parameter(torch.zeros(size))  # what stands above each block's diagonal, row by row

    def rotate(self, q: Tensor, k: Tensor, x: Tensor | None, positions: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        if positions.is_floating_point():
            raise UserError(f"'{self.name}' counts steps: expected integer positions, got fractional ones")
        if self.block == 2:
            turns = self._turns(positions, layer).to(q.device)
            return rotary.turn(q, (turns,)), rotary.turn(k, (turns,))
        digits = once(positions, Skew, lambda: self._digits(positions))
        with torch.autocast(q.device.type, enabled=False):
            steps = [
                torch.linalg.matrix_exp(self._generator(layer) * 2**place).to(q.device, torch.float32)
                for place in range(len(digits))
            ]
            return self._moved(q, steps, digits), self._moved(k, steps, digits)

    def _turns(self, positions: Tensor, layer: int) -> Tensor:
        """What blocks of two channels, as complex numbers, are multiplied by: (1|B, 1|H, T, Dh/2) complex64."""
        steps = self._above(layer)[..., 0] / self.shape.train_length
        angles = -rotary.exact(positions)[:, None, :, None] * steps[:, None]
        return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)

    def _digits(self, positions: Tensor) -> list[Tensor]:
        """Which positions (1|B, T) have a one at each binary place, lowest first: (1|B, 1, 1, T, 1) bool."""
        places = int(on_host(positions).max()).bit_length()
        return [(positions >> place & 1).bool()[:, None, None, :, None] for place in range(places)]

    def _generator(self, layer: int) -> Tensor:
        """A / L by blocks: (1|H, N, b, b) fp64, where its exponentials are made."""
        above = self._above(layer)
        row, column = torch.triu_indices(self.block, self.block, 1, device=above.device)
        generator = above.new_zeros(*above.shape[:-1], self.block, self.block)
        generator[..., row, column] = above
        return (generator - generator.mT) / self.shape.train_length

    def _above(self, layer: int) -> Tensor:
        """In fp64, where there is such a thing."""
        return self.above[layer].to(rotary.has_fp64(self.above.device)).double()

    def _moved(self, a: Tensor, steps: list[Tensor], digits: list[Tensor]) -> Tensor:
        """q or k (B, H, T, Dh) as it is at positions with these digits; the steps are (1|H, N, b, b)."""
        blocks = a.float().reshape(*a.shape[:-1], -1, self.block).transpose(2, 3)  # (B, H, N, T, b)
        for step, one in zip(steps, digits, strict=True):
            blocks = torch.where(one, blocks @ step.mT, blocks)
        return blocks.transpose(2, 3).flatten(-2).to(a.dtype)
