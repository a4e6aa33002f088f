"""Causal attention by tiles of scores, forward and backward written out in plain torch operations.

On CPUs torch's fused kernel reaches about a third of what bf16 matrix products do, and a learned bias sends it down a
path that stores every score. Here a *tile* of scores (some heads of a block of query rows, against the keys those rows
may see) is small enough to stay in cache from the product to the softmax. Keys after the block, or before the window,
are never touched. Biases are added to a tile, so neither they nor their gradients ever exist at (B, H, T, T).

Products run in the dtype of q; bias, logits and softmax in fp32 (fp64 for fp64 inputs). For the backward pass the
probabilities are kept in the dtype of q up to `KEPT_BYTES`, above that recomputed; without gradients nothing is kept,
so that memory grows with heads x block x length.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

# Probabilities in a tile, per CPU thread, about a core's cache; accelerators rather want few launches.
TILE_BYTES = 2**20
TILE_BYTES_ACCELERATOR = 2**27
# Query rows in a tile: more waste work above the diagonal, fewer make the products slim.
MIN_ROWS, MAX_ROWS = 128, 256
# Probabilities that one call (one layer) keeps for its backward pass.
KEPT_BYTES = 128 * 2**20


def blocked_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, bias: "Bias | None" = None, window: int | None = None
) -> Tensor:
    """Causal attention softmax(scale q·k + bias) v.

    Args:
        q, k: queries and keys (B, H, T, Dq), after any rotation, of one dtype.
        v: values (B, H, T, Dh), of the same dtype.
        scale: what q·k is multiplied by.
        bias: a `Table`, `Decay` or `Dense`; None = no bias.
        window: keys a query may see, itself included; None = all before it.

    Returns:
        (B, H, T, Dh) in the same dtype.
    """
    bias = bias or Bias()
    inputs = (q, k, v, *bias.tensors)
    train = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    out: Tensor = _Blocked.apply(_Call(bias, scale, window, train), *inputs)  # type: ignore[no-untyped-call]
    return out


# -- what can be added to the logits -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tile:
    """Scores computed together: some heads of a block of query rows, against the keys those rows may see."""

    heads: slice
    queries: slice
    keys: slice
    mask: Tensor  # (Tq, Tk): 0 where visible, -inf where hidden


class Bias:
    """What is added to the scaled logits; as it stands, nothing."""

    per_sequence: ClassVar[bool] = False  # differs between the sequences of a batch
    whole_heads: ClassVar[bool] = False  # is cheaper for all heads together than for a few at a time

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What receives gradients."""
        return ()

    def of(self, tile: Tile, batch: slice) -> Tensor | None:
        """Bias of a tile: (heads, Tq, Tk), or (sequences, heads, Tq, Tk) if `per_sequence`."""
        return None

    def pull(self, sums: list[Tensor], tile: Tile, batch: slice, grad: Tensor) -> None:
        """Add to `sums`, which are shaped like `tensors`, what follows from `grad`, which is shaped like `of`."""


@dataclasses.dataclass(frozen=True)
class Table(Bias):
    """A bias by distance (ALiBi, T5, KERPLE)."""

    values: Tensor  # (H, T) fp32, at the distances 0 .. T-1

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.values,)

    def of(self, tile: Tile, batch: slice) -> Tensor:
        rows, keys = tile.mask.shape
        falling = F.pad(self.values[tile.heads, :keys].flip(-1), (0, rows - 1))  # by distance, keys - 1 .. 1 - rows
        return _slanted(falling[:, None].repeat(1, rows, 1), keys)

    def pull(self, sums: list[Tensor], tile: Tile, batch: slice, grad: Tensor) -> None:
        heads, rows, keys = grad.shape
        falling = grad.new_zeros(heads, rows, rows + keys - 1)
        _slanted(falling, keys).copy_(grad)
        sums[0][tile.heads, :keys] += falling.sum(1)[:, :keys].flip(-1)


def _slanted(x: Tensor, keys: int) -> Tensor:
    """A view (heads, rows, keys) of contiguous x (heads, rows, rows + keys - 1): each row begins one column further
    left than the row above, the last at column 0. What depends on distance only is equal in all rows of x."""
    heads, rows, width = x.shape
    return x.as_strided((heads, rows, keys), (rows * width, width - 1, 1), rows - 1)


@dataclasses.dataclass(frozen=True)
class Decay(Bias):
    """sums_i - sums_j for query i and key j: what is forgotten in between (FoX)."""

    per_sequence: ClassVar[bool] = True

    sums: Tensor  # (B, H, T) fp32, running sums of the log forget gates

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.sums,)

    def of(self, tile: Tile, batch: slice) -> Tensor:
        sums = self.sums[batch, tile.heads]
        return sums[..., tile.queries, None] - sums[..., None, tile.keys]

    def pull(self, sums: list[Tensor], tile: Tile, batch: slice, grad: Tensor) -> None:
        # Softmax does not see what a whole row shares, so sums_i itself receives nothing.
        sums[0][batch, tile.heads, tile.keys] -= grad.sum(-2, dtype=sums[0].dtype)


@dataclasses.dataclass(frozen=True)
class Dense(Bias):
    """Any bias that all sequences share (FIRE), computed for a block of query rows at a time, and again backwards."""

    whole_heads: ClassVar[bool] = True

    function: Callable[..., Tensor]  # (queries: slice, keys: slice, *parameters) -> (H, Tq, Tk) fp32
    parameters: tuple[Tensor, ...]  # what the function depends on and gradients go to

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.parameters

    def of(self, tile: Tile, batch: slice) -> Tensor:
        return self.function(tile.queries, tile.keys, *self.parameters)

    def pull(self, sums: list[Tensor], tile: Tile, batch: slice, grad: Tensor) -> None:
        with torch.enable_grad():
            parameters = [tensor.detach().requires_grad_() for tensor in self.parameters]
            bias = self.function(tile.queries, tile.keys, *parameters)
        for total, part in zip(sums, torch.autograd.grad(bias, parameters, grad.to(bias.dtype)), strict=True):
            total += part


# -- the kernel --------------------------------------------------------------------------------------------------------


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: "_Call", q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> Tensor:
        out = _empty_like(v)
        kept: list[Tensor] = []
        ctx.call, ctx.keep = call, call.train and call.score_bytes(q) <= KEPT_BYTES
        with torch.autocast(q.device.type, enabled=False):
            for tile in call.tiles(q):
                added = call.added_for_all(tile)
                for batch in call.groups(tile, q):
                    queries, keys = (batch, tile.heads, tile.queries), (batch, tile.heads, tile.keys)
                    probabilities = call.probabilities(q[queries], k[keys], tile, batch, added)
                    out[queries] = _product(probabilities, v[keys])
                    if ctx.keep:
                        kept.append(probabilities)
        ctx.save_for_backward(q, k, v, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        q, k, v, *kept = ctx.saved_tensors
        remaining = iter(kept)
        dq, dk, dv = _empty_like(q), _KeyGradient(k, call), _KeyGradient(v, call)
        sums = [torch.zeros_like(tensor) for tensor in call.bias.tensors]
        learned = any(ctx.needs_input_grad[4:])
        with torch.autocast(q.device.type, enabled=False):
            for tile in call.tiles(q):
                added = None if ctx.keep else call.added_for_all(tile)
                total = None
                for batch in call.groups(tile, q):
                    queries, keys = (batch, tile.heads, tile.queries), (batch, tile.heads, tile.keys)
                    if ctx.keep:
                        probabilities = next(remaining)
                    else:
                        probabilities = call.probabilities(q[queries], k[keys], tile, batch, added)
                    grad = _product(grad_out[queries], v[keys].mT)
                    grad = torch._softmax_backward_data(grad, probabilities, -1, q.dtype)
                    dq[queries] = _product(grad, k[keys], call.scale)
                    dk.add(keys, _product(grad.mT, q[queries], call.scale))
                    dv.add(keys, _product(probabilities.mT, grad_out[queries]))
                    if learned and call.bias.per_sequence:
                        call.bias.pull(sums, tile, batch, grad)
                    elif learned:
                        total = _sum(grad, total)
                if total is not None:
                    call.bias.pull(sums, tile, slice(None), total)
        return None, dq, dk.result(), dv.result(), *sums


@dataclasses.dataclass(frozen=True)
class _Call:
    """One call's settings, and how its scores are cut up."""

    bias: Bias
    scale: float
    window: int | None
    train: bool  # gradients will be asked for

    def blocks(self, q: Tensor) -> list[tuple[int, int, int]]:
        """Blocks of query rows: first and last row (exclusive), first key."""
        length = q.shape[2]
        seen = min(length, self.window or length)
        rows = max(MIN_ROWS, min(MAX_ROWS, TILE_BYTES // (seen * q.element_size())))
        starts = range(0, length, rows)
        return [(start, min(length, start + rows), max(0, start + 1 - seen)) for start in starts]

    def score_bytes(self, q: Tensor) -> int:
        scores = sum((stop - start) * (stop - first) for start, stop, first in self.blocks(q))
        return q.shape[0] * q.shape[1] * scores * q.element_size()

    def tiles(self, q: Tensor) -> Iterator[Tile]:
        n_heads = q.shape[1]
        for start, stop, first in self.blocks(q):
            mask = self._mask(stop - start, stop - first, q)
            group = n_heads if self.bias.whole_heads else max(1, min(n_heads, _budget(q) // mask.numel()))
            for head in range(0, n_heads, group):
                yield Tile(slice(head, min(n_heads, head + group)), slice(start, stop), slice(first, stop), mask)

    def groups(self, tile: Tile, q: Tensor) -> Iterator[slice]:
        """Sequences that go through a tile together: several where the tile is small."""
        batch = q.shape[0]
        together = max(1, _budget(q) // ((tile.heads.stop - tile.heads.start) * tile.mask.numel()))
        return (slice(first, min(batch, first + together)) for first in range(0, batch, together))

    def _mask(self, rows: int, keys: int, like: Tensor) -> Tensor:
        hidden = torch.full((rows, keys), -math.inf, dtype=_exact(like), device=like.device)
        mask = hidden.triu(keys - rows + 1)
        return mask + hidden.tril(keys - rows - self.window) if self.window else mask

    def added_for_all(self, tile: Tile) -> Tensor | None:
        """Bias and mask of a tile where all sequences share them."""
        return None if self.bias.per_sequence else self._added(tile, slice(None))

    def _added(self, tile: Tile, batch: slice) -> Tensor:
        bias = self.bias.of(tile, batch)
        return tile.mask if bias is None else bias + tile.mask

    def probabilities(self, q: Tensor, k: Tensor, tile: Tile, batch: slice, added: Tensor | None) -> Tensor:
        """Softmax of a tile's logits (sequences, heads, Tq, Tk), in q's dtype."""
        if added is None:
            added = self._added(tile, batch)
        return torch.softmax(torch.add(added, _product(q, k.mT), alpha=self.scale), -1).to(q.dtype)


class _KeyGradient:
    """Gradient of keys or values. Where several blocks of queries add to it: summed in fp32, rounded once."""

    def __init__(self, x: Tensor, call: _Call) -> None:
        self.dtype = x.dtype
        self.single = len(call.blocks(x)) == 1
        self.total = _empty_like(x) if self.single else torch.zeros_like(_empty_like(x), dtype=_exact(x))

    def add(self, keys: tuple[slice, ...], part: Tensor) -> None:
        if self.single:
            self.total[keys] = part
        else:
            self.total[keys] += part

    def result(self) -> Tensor:
        return self.total.to(self.dtype)


def _budget(q: Tensor) -> int:
    """Scores in a tile."""
    per_tile = TILE_BYTES * torch.get_num_threads() if q.device.type == "cpu" else TILE_BYTES_ACCELERATOR
    return per_tile // q.element_size()


def _exact(x: Tensor) -> torch.dtype:
    """What logits and sums are computed in: fp32, or fp64 for fp64 inputs."""
    return torch.promote_types(x.dtype, torch.float32)


def _empty_like(x: Tensor) -> Tensor:
    """An empty (B, H, T, D) that lies in memory as (B, T, H, D), the order the projections around attention use."""
    batch, heads, length, width = x.shape
    return x.new_empty(batch, length, heads, width).transpose(1, 2)


def _product(a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    """scale a @ b for every sequence and head, rounded once."""
    flat_a, flat_b = a.flatten(0, 1), b.flatten(0, 1)
    if scale == 1.0:
        return torch.bmm(flat_a, flat_b).view(*a.shape[:-1], b.shape[-1])
    ignored = a.new_zeros(())  # beta=0
    return torch.baddbmm(ignored, flat_a, flat_b, beta=0, alpha=scale).view(*a.shape[:-1], b.shape[-1])


def _sum(parts: Tensor, total: Tensor | None) -> Tensor:
    """`total` and all of `parts` (along the first axis), in fp32 or fp64."""
    if total is None:
        total, parts = parts[0].to(_exact(parts), copy=True), parts[1:]
    for part in parts:
        total += part
    return total
