"""Encodings whose rotation is the exponential of a learned matrix.

Position n acts on queries and keys as exp(n·A / u), where u is the training length or 1, and A is skew-symmetric (A' =
-A) with square blocks along its diagonal. All exp(n·A / u) commute, so a logit depends on content and distance alone.

For blocks wider than two, n is in binary: a vector is multiplied by exp(2^b·A / u) for each digit b of n that is 1.
"""

import math
from typing import Annotated

import torch
from annotated_types import Gt, Le
from torch import Tensor, nn

from posbench.encodings.base import Encoding, Layer, Shape
from posbench.encodings.rope import check_pairs, double, frequencies, turned
from posbench.errors import UserError
from posbench.options import Above1, Positive


class Skew(Encoding):
    """Base of these encodings; a subclass sets initial values."""

    whole_positions = True

    def __init__(self, shape: Shape, block: int | None, heads: int, unit: int, layers: int) -> None:
        super().__init__(shape)
        if block is not None:
            fits = block >= 2 and shape.head_dim % block == 0
            self.expect(fits, "block", block, f"a divisor of the {shape.head_dim} channels of a head, at least 2")
        self.unit, self.block = unit, shape.head_dim if block is None else block
        entries = self.block * (self.block - 1) // 2  # above the diagonal of a block, row by row
        self.above = nn.Parameter(torch.zeros(layers, heads, shape.head_dim // self.block, entries))

    def make_tables(self, positions: Tensor) -> tuple[list[Tensor], list[Tensor]] | None:
        """Return masks (1|B, 1, 1, T, 1) by binary digit of the positions, lowest first, and the steps of layer 0."""
        if positions.is_floating_point():
            raise UserError(f"'{self.name}' counts steps: expected integer positions, got fractional ones")
        if self.block == 2:
            return None
        places = range(int(positions.max()).bit_length())
        digits = [(positions >> place & 1).bool()[:, None, None, :, None] for place in places]
        return digits, self._steps(0, len(digits), positions.device) if len(self.above) == 1 else []

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        if self.block == 2:
            angles = (
                -double(layer.positions)[:, None, :, None]
                * double(self.above[layer.index % len(self.above)]).mT
                / self.unit
            )
            rotation = torch.polar(torch.ones_like(angles), angles).to(torch.complex64).to(q.device)
            return turned(q, k, rotation, "interleaved")
        digits, steps = layer.tables
        steps = steps or self._steps(layer.index, len(digits), q.device)
        return self._moved(q, steps, digits), self._moved(k, steps, digits)

    def _steps(self, layer: int, places: int, device: torch.device) -> list[Tensor]:
        """Return exp(2^b·A / u) for b = 0 .. places-1, by blocks: (1|H, N, b, b), each the square of the one before."""
        above = double(self.above[layer % len(self.above)])
        row, column = torch.triu_indices(self.block, self.block, 1, device=above.device)
        generator = above.new_zeros(*above.shape[:-1], self.block, self.block)
        generator[..., row, column] = above
        steps = [torch.linalg.matrix_exp((generator - generator.mT) / self.unit)]
        while len(steps) < places:
            steps.append(steps[-1] @ steps[-1])
        return [step.to(device, torch.float32) for step in steps[:places]]

    def _moved(self, a: Tensor, steps: list[Tensor], digits: list[Tensor]) -> Tensor:
        """Return q or k (B, H, T, Dh), rotated to positions with these binary digits."""
        blocks = a.reshape(*a.shape[:-1], -1, self.block).transpose(2, 3)  # (B, H, N, T, b)
        for step, digit in zip(steps, digits, strict=True):
            blocks = torch.where(digit, blocks @ step.mT.to(a.dtype), blocks)
        return blocks.transpose(2, 3).flatten(-2)


class LieRE(Skew):
    """Lie rotational position encoding (LieRE), for text: one learned rotation, applied once per token.

        q'_n = exp(n·A / L) q_n,   k'_n = exp(n·A / L) k_n,   A' = -A,   L the training length

    One dense A per layer and head, or one per layer (`per_head: false`). It starts uniform in 0 .. 2π.

    Source: Ostmeier et al., "LieRE: Lie Rotational Positional Encodings" (2024), arXiv:2406.10322, and the authors'
    code, in one dimension, whose unit is the length of an image; its scripts have blocks of 8 channels (`block: 8`).
    Beyond training length: defined everywhere; slow planes reach angles never seen in training.
    Checked against: torch's matrix exponential at each position.
    """

    def __init__(self, shape: Shape, per_head: bool = True, block: int | None = None) -> None:
        super().__init__(shape, block, shape.n_heads if per_head else 1, shape.train_length, shape.n_layers)
        nn.init.uniform_(self.above, 0, 2 * math.pi)


class ComRoPE(Skew):
    """ComRoPE, for text: learned rotations of small blocks of channels.

        q'_n = exp(n·A / L) q_n,   k'_n = exp(n·A / L) k_n,   A = diag(P_1 - P_1', P_2 - P_2' ...),   P ~ N(0, std)

    With blocks of 2 this is RoPE with frequencies learned per layer and head. L is the training length, the authors' is
    that of an image, with 14 patches along an axis: with `std` = L / 14 a token first turns as far as a patch.

    Source: Yu et al., "ComRoPE: Scalable and Robust Rotary Position Embedding Parameterized by Trainable Commuting
    Angle Matrices" (2025), arXiv:2506.03737, and the authors' code, in one dimension, where all its matrices commute.
    Beyond training length: defined everywhere; slow planes reach angles never seen in training.
    Checked against: torch's matrix exponential at each position.
    """

    def __init__(self, shape: Shape, block: int = 2, std: Positive = 1.0) -> None:
        super().__init__(shape, block, shape.n_heads, shape.train_length, shape.n_layers)
        nn.init.normal_(self.above, 0, math.sqrt(2) * std)  # the deviation of a difference of two entries of P


class Algebraic(Skew):
    """Algebraic positional encodings, for sequences: position n is the n-th power of one learned orthogonal matrix.

        q'_n = W^n q_n,   k'_n = W^n k_n,   W = exp(P - P'),   logits_mn = decay^|m-n| · q'_m·k'_n / sqrt(d)

    One W per head for all layers, RoPE at the start. `decay: 1` has no decay, and faster kernels.

    Source: Kogkalidis, Bernardy and Garg, "Algebraic Positional Encodings" (2023), arXiv:2312.16045, sections 3.1 and
    4; in the authors' code (konstantinosKokos/ape) W starts with every speed for two pairs.
    Beyond training length: defined everywhere; slow planes reach angles never seen in training.
    Checked against: torch's matrix power of its matrix exponential, in plain loops.
    """

    def __init__(self, shape: Shape, base: Above1 = 10000.0, decay: Annotated[float, Gt(0), Le(1)] = 0.98) -> None:
        check_pairs(self.name, shape)
        super().__init__(shape, None, shape.n_heads, unit=1, layers=1)
        self.decay = decay
        row, column = torch.triu_indices(shape.head_dim, shape.head_dim, 1)
        speeds = frequencies(shape.head_dim, base)[row // 2]
        with torch.no_grad():  # above the diagonal, where a rotation has -sin
            self.above.copy_(torch.where((row % 2 == 0) & (column == row + 1), -speeds, 0.0))

    @property
    def hooks(self) -> frozenset[str]:
        return self.overridden if self.decay < 1 else self.overridden - {"scores"}

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        return logits * (self.decay ** layer.distance.abs())[:, None]
