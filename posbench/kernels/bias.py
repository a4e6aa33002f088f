"""Additions to the logits of causal attention, as data: an encoding declares one, a kernel applies it by tiles.

Neither a bias by distance nor a decay, nor their gradients, ever exist at (B, H, T, T).
"""

import dataclasses

import torch.nn.functional as F
from torch import Tensor

from posbench.kernels.tiles import Tile


@dataclasses.dataclass(frozen=True)
class Bias:
    """An addition to the scaled logits; this base class adds nothing."""

    @property
    def per_sequence(self) -> bool:
        """Whether the bias differs between the sequences of a batch."""
        return False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that receive gradients."""
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    def of(self, tile: Tile, batch: slice) -> Tensor | None:
        """Bias of a tile: (heads, Tq, Tk), or (sequences, heads, Tq, Tk) if `per_sequence`."""
        return None

    def pull(self, sums: list[Tensor], tile: Tile, batch: slice, grad: Tensor) -> None:
        """Add the gradients of `tensors` to `sums`, given `grad`, the gradient of what `of` returns."""


@dataclasses.dataclass(frozen=True)
class Table(Bias):
    """A bias by distance (ALiBi, T5, KERPLE)."""

    values: Tensor  # (H, T) fp32, at the distances 0 .. T-1

    def of(self, tile: Tile, batch: slice) -> Tensor:
        rows, keys = tile.mask.shape
        falling = F.pad(self.values[tile.heads, :keys].flip(-1), (0, rows - 1))  # 0 for hidden keys
        return _slanted(falling[:, None].repeat(1, rows, 1), keys)

    def pull(self, sums: list[Tensor], tile: Tile, batch: slice, grad: Tensor) -> None:
        rows, keys = grad.shape[-2:]
        wide = grad.new_zeros(*grad.shape[:-1], rows + keys - 1)
        _slanted(wide, keys).copy_(grad)
        sums[0][tile.heads, :keys] += wide.sum(1)[:, :keys].flip(-1)


def _slanted(x: Tensor, keys: int) -> Tensor:
    """A view (..., rows, keys) of contiguous x (..., rows, rows + keys - 1): each row begins one column further left
    than the row above, the last at column 0. What depends on distance only is equal in all rows of x."""
    rows, width = x.shape[-2:]
    return x.as_strided((*x.shape[:-1], keys), (*x.stride()[:-2], width - 1, 1), rows - 1)


@dataclasses.dataclass(frozen=True)
class Decay(Bias):
    """sums_i - sums_j for query i and key j: what is forgotten in between (FoX)."""

    per_sequence = True

    sums: Tensor  # (B, H, T) fp32, running sums of the log forget gates

    def of(self, tile: Tile, batch: slice) -> Tensor:
        sums = self.sums[batch, tile.heads]
        return sums[..., tile.queries, None] - sums[..., None, tile.keys]

    def pull(self, sums: list[Tensor], tile: Tile, batch: slice, grad: Tensor) -> None:
        # Softmax does not see what a whole row shares, so sums_i itself receives nothing.
        sums[0][batch, tile.heads, tile.keys] -= grad.sum(-2, dtype=sums[0].dtype)


@dataclasses.dataclass(frozen=True)
class LaidOut(Bias):
    """Any bias, held for all pairs of a block of rows."""

    values: Tensor  # (H, Tq, Tk) fp32, or (B, H, Tq, Tk) where sequences have biases of their own

    @property
    def per_sequence(self) -> bool:
        return self.values.dim() == 4

    def of(self, tile: Tile, batch: slice) -> Tensor:
        return self._part(self.values, tile, batch)

    def pull(self, sums: list[Tensor], tile: Tile, batch: slice, grad: Tensor) -> None:
        self._part(sums[0], tile, batch).add_(grad)

    def _part(self, x: Tensor, tile: Tile, batch: slice) -> Tensor:
        return (x[batch] if self.per_sequence else x)[..., tile.heads, tile.queries, tile.keys]
