"""Learned rotations: exponentials of learned skew-symmetric matrices, and SPE's learned
waves.
"""

import math
from typing import Annotated

import torch
import torch.nn.functional as F
from annotated_types import Gt, Le
from torch import Tensor, nn

from posbench.encodings.absolute import check_whole
from posbench.encodings.base import Encoding, Layer, Shape
from posbench.encodings.rope import (
    check_pairs,
    cos_sin,
    frequencies,
    rotate_both,
    to_fp64,
)
from posbench.options import Above1, Block, Count, Positive


class Skew(Encoding):
    """Base of encodings that turn by exp(n·A / u) at position n, A' = -A in square
    blocks; a subclass initialises A.

    For blocks wider than two, n is in binary: a vector is multiplied by exp(2^b·A / u)
    for each digit b that is 1.
    """

    whole_positions = True

    def __init__(
        self, shape: Shape, block: int | None, heads: int, unit: int, layers: int
    ) -> None:
        super().__init__(shape)
        self.unit = unit
        self.block = block or shape.head_dim
        self.expect(
            shape.head_dim % self.block == 0,
            "block",
            block,
            f"a divisor of the {shape.head_dim} channels",
        )
        # above the diagonal of a block, row by row
        entries = self.block * (self.block - 1) // 2
        n_blocks = shape.head_dim // self.block
        self.above = nn.Parameter(torch.zeros(layers, heads, n_blocks, entries))

    def make_tables(
        self, positions: Tensor
    ) -> tuple[list[Tensor], list[Tensor]] | None:
        # Masks (1|B, 1, 1, T, 1) by binary digit, lowest first, and the steps, if all
        # layers share them.
        check_whole(self, positions)
        if self.block == 2:
            return None
        digits = []
        for place in range(int(positions.max()).bit_length()):
            is_1 = (positions >> place & 1).bool()
            digits.append(is_1[:, None, None, :, None])
        if len(self.above) != 1:
            return digits, []
        return digits, self._steps(0, len(digits), positions.device)

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        if self.block == 2:
            return self._rotated(q, k, layer)
        digits, steps = layer.tables
        steps = steps or self._steps(layer.index, len(digits), q.device)
        return self._moved(q, steps, digits), self._moved(k, steps, digits)

    def _rotated(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        """Return q and k turned in planes, as a block of two channels turns them."""
        speeds = self._of_layer(layer.index).mT / self.unit  # (1|H, 1, N)
        positions = to_fp64(layer.positions)[:, None, :, None]
        of_planes = cos_sin(-positions * speeds, q.device)[:, :, 0]
        return rotate_both(q, k, of_planes, "interleaved")

    def _steps(self, layer: int, places: int, device: torch.device) -> list[Tensor]:
        """Return exp(2^b·A / u) for b = 0 .. places-1, by blocks: (1|H, N, b, b), each
        the square of the one before.
        """
        above = self._of_layer(layer)
        row, column = torch.triu_indices(self.block, self.block, 1, device=above.device)
        size = (*above.shape[:-1], self.block, self.block)
        upper = above.new_zeros(size)
        upper[..., row, column] = above
        steps = [torch.linalg.matrix_exp((upper - upper.mT) / self.unit)]
        while len(steps) < places:
            steps.append(steps[-1] @ steps[-1])
        return [step.to(device, torch.float32) for step in steps[:places]]

    def _of_layer(self, layer: int) -> Tensor:
        """Return what is above the diagonals of A: (1|H, N, entries) fp64."""
        return to_fp64(self.above[layer % len(self.above)])

    def _moved(self, a: Tensor, steps: list[Tensor], digits: list[Tensor]) -> Tensor:
        # (B, H, N, T, b)
        blocks = a.reshape(*a.shape[:-1], -1, self.block).transpose(2, 3)
        for step, digit in zip(steps, digits, strict=True):
            blocks = torch.where(digit, blocks @ step.mT.to(a.dtype), blocks)
        return blocks.transpose(2, 3).flatten(-2)


class LieRE(Skew):
    """Lie rotational position encoding (LieRE), for text: one learned rotation, applied
    once per token.

        q'_n = exp(n·A / L) q_n,   k'_n = exp(n·A / L) k_n,   A' = -A,
        L the training length

    Source: Ostmeier et al. (2024), arXiv:2406.10322, and the authors' code, in one
    dimension.
    Beyond training length: defined everywhere; slow planes reach angles never seen in
    training.
    Checked against: torch's matrix exponential at each position.
    """

    def __init__(
        self, shape: Shape, per_head: bool = True, block: Block | None = None
    ) -> None:
        heads = shape.n_heads if per_head else 1
        super().__init__(shape, block, heads, shape.train_length, shape.n_layers)
        nn.init.uniform_(self.above, 0, 2 * math.pi)


class ComRoPE(Skew):
    """ComRoPE, for text: learned rotations of small blocks of channels.

        q'_n = exp(n·A / L) q_n,   k'_n = exp(n·A / L) k_n,
        A = diag(P_1 - P_1', P_2 - P_2' ...),   P ~ N(0, std)

    Source: Yu et al. (2025), arXiv:2506.03737, and the authors' code, in one dimension,
    where all its matrices commute.
    Beyond training length: defined everywhere; slow planes reach angles never seen in
    training.
    Checked against: torch's matrix exponential at each position.
    """

    def __init__(self, shape: Shape, block: Block = 2, std: Positive = 1.0) -> None:
        super().__init__(
            shape, block, shape.n_heads, shape.train_length, shape.n_layers
        )
        # the deviation of a difference of two entries of P
        nn.init.normal_(self.above, 0, math.sqrt(2) * std)


class Algebraic(Skew):
    """Algebraic positional encodings, for sequences: position n is the n-th power of
    one learned orthogonal matrix.

        q'_n = W^n q_n,   k'_n = W^n k_n,   W = exp(P - P'),
        logits_mn = decay^|m-n| · q'_m·k'_n / sqrt(d)

    Source: Kogkalidis, Bernardy and Garg (2023), arXiv:2312.16045, sections 3.1 and 4.
    Beyond training length: defined everywhere; slow planes reach angles never seen in
    training.
    Checked against: torch's matrix power of its matrix exponential, in plain loops.
    """

    def __init__(
        self,
        shape: Shape,
        base: Above1 = 10000.0,
        decay: Annotated[float, Gt(0), Le(1)] = 0.98,
    ) -> None:
        check_pairs(self.name, shape)
        super().__init__(shape, None, shape.n_heads, unit=1, layers=1)
        self.decay = decay
        if decay == 1:
            self.leave_out("scores")
        # W starts as RoPE: above the diagonal, a rotation has -sin
        row, column = torch.triu_indices(shape.head_dim, shape.head_dim, 1)
        speeds = frequencies(shape.head_dim, base)[row // 2]
        is_pair = (row % 2 == 0) & (column == row + 1)
        with torch.no_grad():
            self.above.copy_(torch.where(is_pair, -speeds, 0.0))

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        decay = self.decay ** layer.distance.abs()
        return logits * decay[:, None]


class SPE(Encoding):
    """Stochastic positional encoding with sines (sineSPE), by its mean: each channel
    has a learned kernel of distance.

        logits_ij = sum over c of q_ic·k_jc·P_c(i - j) / sqrt(d)
        P_c(r) = (1 - g_c)·(1/2K)·sum over s = 1 .. K of
                 softplus(gain_cs)^2·cos(2π f_cs r + phase_cs) + g_c

    f_cs = sigmoid(.)/2 is in turns per token, g_c = sigmoid(.) a gate; all are learned
    per layer and head.

    Source: Liutkus et al. (2021), arXiv:2105.08399, and the authors' code; there random
    processes stand for P.
    Beyond training length: defined everywhere; slow sines reach angles never seen in
    training.
    Checked against: plain loops over pairs and channels from the authors' code.
    """

    def __init__(self, shape: Shape, sines: Count = 1, gated: bool = True) -> None:
        super().__init__(shape)
        channels = (shape.n_layers, shape.n_heads, shape.head_dim)
        gain = torch.randn(*channels, sines)
        norm = gain.norm(dim=-1, keepdim=True)
        self.gain = nn.Parameter(2 * gain / norm.sqrt())
        self.frequency = nn.Parameter(torch.randn(*channels, sines) - 4)
        self.phase = nn.Parameter(torch.randn(*channels, sines))
        self.gate: nn.Parameter | None = None
        if gated:
            self.gate = nn.Parameter(torch.randn(channels))

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        places = to_fp64(layer.positions)[:, None, :, None, None]  # (1|B, 1, T, 1, 1)
        frequency = self.frequency[layer.index].to(places.device).double()  # (H, Dh, K)
        phase = self.phase[layer.index].to(places.device).double()
        angles = math.pi * frequency.sigmoid()[:, None] * places  # (1|B, H, T, Dh, K)

        gain = F.softplus(self.gain[layer.index])
        size = gain / math.sqrt(2 * gain.shape[-1])  # (H, Dh, K)
        if self.gate is None:
            return _waved(q, angles + phase[:, None], size), _waved(k, angles, size)

        gate = self.gate[layer.index]  # (H, Dh)
        size = size * (-gate).sigmoid().sqrt()[..., None]
        wide_q = _waved(q, angles + phase[:, None], size)
        wide_k = _waved(k, angles, size)
        return _with_constant(wide_q, q, gate), _with_constant(wide_k, k, gate)


def _waved(x: Tensor, angles: Tensor, size: Tensor) -> Tensor:
    """Return x (B, H, T, Dh), each channel times its K cosines and K sines: (B, H, T,
    Dh·2K).
    """
    cosines = size[:, None] * angles.cos().to(size)
    sines = size[:, None] * angles.sin().to(size)
    waves = torch.cat((cosines, sines), dim=-1)
    return (x[..., None] * waves).flatten(-2)


def _with_constant(wide: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    """Return the waves and, beside them, each channel times the root of its gate g."""
    root = gate.sigmoid().sqrt()[:, None]
    return torch.cat((wide, x * root), dim=-1)
