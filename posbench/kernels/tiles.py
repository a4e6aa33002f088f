"""The tiles of scores in causal attention, and the operations on them.

A tile is the scores of some heads of a block of query rows, against the keys those rows may see. It is small enough to
stay in a core's cache from the product to the softmax. Keys after the block, or before the window, are in no tile.

Batch and heads are one axis in here, (B H, T, D): whole heads of several sequences, or some heads of one, are then one
slice of it, and no product has to copy what it reads.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from posbench import machine

# Probabilities in a tile, per CPU thread: about a core's cache. Accelerators rather want few launches.
TILE_BYTES = 2**20
TILE_BYTES_ACCELERATOR = 2**27
# Query rows in a tile: more waste work above the diagonal, fewer make the products slim. In between, half of the
# keys: two blocks have a quarter less to do than one.
MIN_ROWS, MAX_ROWS = 128, 256
MAX_ROWS_ACCELERATOR = 1024
# Probabilities that one call (one layer) keeps for its backward pass; above that it computes them again. Accelerators
# give a share of their memory, of which a dozen layers leave most.
KEPT_BYTES = 128 * 2**20
KEPT_SHARE_ACCELERATOR = 1 / 64
# Masks that are kept for all layers and steps: numbers in one, and how many.
MASK_NUMBERS, MASKS = 2**18, 32


@dataclasses.dataclass(frozen=True)
class Tile:
    heads: slice
    queries: slice
    keys: slice
    mask: Tensor  # (Tq, Tk): 0 where visible, -inf where hidden
    batches: tuple[slice, ...]  # sequences that are computed together: several only if all heads are in the tile
    n_heads: int  # of the layer

    def part(self, batch: slice) -> slice:
        """Where the tile's heads of some of its sequences are on the axis (B H)."""
        return slice(batch.start * self.n_heads + self.heads.start, (batch.stop - 1) * self.n_heads + self.heads.stop)

    def by_head(self, x: Tensor) -> Tensor:
        """x (sequences heads, ...), which `part` gave, as (sequences, heads, ...)."""
        return x.view(-1, self.heads.stop - self.heads.start, *x.shape[1:])


@dataclasses.dataclass(frozen=True)
class Cut:
    """The tiles of one call's scores (B, H, Tq, Tk)."""

    like: Tensor  # the queries
    window: int | None = None  # keys a query may see, itself included
    before: int = 0  # keys before the first query's own

    def blocks(self) -> list[tuple[int, int, int]]:
        """Blocks of query rows: first row, last row (exclusive), first key."""
        length, before = self.like.shape[2], self.before
        seen = min(before + length, self.window or before + length)
        rows = max(MIN_ROWS, min(self._most_rows(seen), seen // 2))
        starts = range(0, length, rows)
        return [(start, min(length, start + rows), max(0, before + start + 1 - seen)) for start in starts]

    def is_kept(self) -> bool:
        """Whether the probabilities of all tiles are few enough to be kept for the backward pass."""
        batch, heads, _, _ = self.like.shape
        scores = sum((stop - start) * (self.before + stop - first) for start, stop, first in self.blocks())
        return batch * heads * scores * self.like.element_size() <= kept_bytes(self.like.device)

    def tiles(self, last_first: bool = False) -> Iterator[Tile]:
        batch, n_heads, _, _ = self.like.shape
        for start, stop, first in self.blocks()[:: -1 if last_first else 1]:
            keys = slice(first, self.before + stop)
            mask = self._mask(stop - start, keys.stop - first)
            fitting = max(1, self._tile_scores() // mask.numel())  # heads of one sequence, or of several
            heads = min(n_heads, fitting)
            batches = tuple(_slices(batch, max(1, fitting // heads)))
            for some in _slices(n_heads, heads):
                yield Tile(some, slice(start, stop), keys, mask, batches, n_heads)

    def _most_rows(self, seen: int) -> int:
        """Of a block whose rows see so many keys."""
        row = seen * self.like.element_size()
        if self.like.device.type == "cpu":
            return min(MAX_ROWS, TILE_BYTES // row)
        return min(MAX_ROWS_ACCELERATOR, TILE_BYTES_ACCELERATOR // row)

    def _tile_scores(self) -> int:
        on_cpu = self.like.device.type == "cpu"
        size = TILE_BYTES * torch.get_num_threads() if on_cpu else TILE_BYTES_ACCELERATOR
        return size // self.like.element_size()

    def _mask(self, rows: int, keys: int) -> Tensor:
        make = _kept_mask if rows * keys <= MASK_NUMBERS else _mask
        return make(rows, keys, self.window, exact(self.like), self.like.device)


def _mask(rows: int, keys: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    hidden = torch.full((rows, keys), -math.inf, dtype=dtype, device=device)
    mask = hidden.triu(keys - rows + 1)
    return mask + hidden.tril(keys - rows - window) if window else mask


@functools.lru_cache(MASKS)
def _kept_mask(rows: int, keys: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # evaluation may be the first to ask, and training the second
        return _mask(rows, keys, window, dtype, device)


def kept_bytes(device: torch.device) -> int:
    """Bytes that one layer may keep for its backward pass."""
    if device.type == "cpu":
        return KEPT_BYTES
    return max(KEPT_BYTES, int(machine.device_memory(device) * KEPT_SHARE_ACCELERATOR))


class KeyGradient:
    """Gradient of keys or values (B H, T, D), to which every block of queries adds.

    One or two blocks add in the dtype of x, which costs one more rounding at most; more of them in fp32.
    """

    def __init__(self, x: Tensor, blocks: int) -> None:
        self.dtype = x.dtype
        self.total = torch.zeros_like(x, dtype=x.dtype if blocks <= 2 else exact(x))

    def add(self, part: slice, keys: slice, a: Tensor, b: Tensor, scale: float = 1.0) -> None:
        """Add scale a @ b at these keys."""
        total = self.total[part, keys]
        if total.dtype == a.dtype:
            torch.baddbmm(total, a, b, alpha=scale, out=total)
        else:
            total += product(a, b, scale)

    def result(self) -> Tensor:
        return self.total.to(self.dtype)


def flat(x: Tensor) -> Tensor:
    """x (B, H, T, D) as contiguous (B H, T, D)."""
    return x.contiguous().flatten(0, 1)


def unflat(x: Tensor, like: Tensor) -> Tensor:
    """x (B H, T, D) as (B, H, T, D), with B and H those of `like`."""
    return x.view(*like.shape[:2], *x.shape[1:])


def exact(x: Tensor) -> torch.dtype:
    """The dtype of logits and sums: fp32, or fp64 for fp64 inputs."""
    return torch.promote_types(x.dtype, torch.float32)


def product(a: Tensor, b: Tensor, scale: float = 1.0, out: Tensor | None = None) -> Tensor:
    """scale a @ b for every sequence and head, rounded once."""
    if scale == 1.0:
        return torch.bmm(a, b, out=out)
    unread = a.new_empty(())  # by beta=0; to fill it would be a kernel on CUDA
    return torch.baddbmm(unread, a, b, beta=0, alpha=scale, out=out)


def softmax_backward(grad: Tensor, probabilities: Tensor) -> Tensor:
    """Gradient of the logits from that of their softmax, both in the dtype of the probabilities."""
    return torch._softmax_backward_data(grad, probabilities, -1, probabilities.dtype)


def _slices(size: int, step: int) -> Iterator[slice]:
    return (slice(start, min(size, start + step)) for start in range(0, size, step))
