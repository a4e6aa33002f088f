"""Additions to the logits of causal attention, as data: an encoding declares one, a kernel applies it by tiles.

Neither a bias nor its gradient ever exists at (B, H, T, T).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from posbench.kernels.tiles import Tile


@dataclasses.dataclass(frozen=True)
class Bias:
    """An addition to the scaled logits; this base class adds nothing."""

    whole_heads: ClassVar[bool] = False  # is cheaper for all heads together than for a few at a time

    @property
    def per_sequence(self) -> bool:
        """Whether the bias differs between the sequences of a batch."""
        return False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that receive gradients: those among its fields, unless a subclass says otherwise."""
        fields = (getattr(self, field.name) for field in dataclasses.fields(self))
        return tuple(value for value in fields if isinstance(value, Tensor))

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
        return by_distance(self.values[tile.heads, :keys], rows)

    def pull(self, sums: list[Tensor], tile: Tile, batch: slice, grad: Tensor) -> None:
        keys = grad.shape[-1]
        sums[0][tile.heads, :keys] += _slanted_gradient(grad, grad).sum(1)[:, :keys].flip(-1)


@dataclasses.dataclass(frozen=True)
class Line(Table):
    """A bias that falls linearly with distance and is not learned (ALiBi): a kernel may do without the table."""

    slopes: Tensor  # (H,) fp32: values are -slopes x distance

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.values,)


def by_distance(values: Tensor, rows: int) -> Tensor:
    """Values (H, Tk) at the distances 0 .. Tk-1 laid out for the last `rows` queries of Tk tokens: (H, rows, Tk)."""
    keys = values.shape[1]
    falling = F.pad(values.flip(-1), (0, rows - 1))  # at the distances Tk - 1 .. 1 - rows; 0 for hidden keys
    return _slanted(falling[:, None].repeat(1, rows, 1), keys)


def _slanted(x: Tensor, keys: int) -> Tensor:
    """A view (..., rows, keys) of contiguous x (..., rows, rows + keys - 1): each row begins one column further left
    than the row above, the last at column 0. What depends on distance only is equal in all rows of x."""
    rows, width = x.shape[-2:]
    return x.as_strided((*x.shape[:-1], keys), (*x.stride()[:-2], width - 1, 1), rows - 1)


def _slanted_gradient(grad: Tensor, like: Tensor) -> Tensor:
    """Of x, from that of the view that `_slanted` gives of it, in the dtype of `like`."""
    rows, keys = grad.shape[-2:]
    wide = like.new_zeros(*grad.shape[:-1], rows + keys - 1)
    _slanted(wide, keys).copy_(grad)
    return wide


@dataclasses.dataclass(frozen=True)
class Decay(Bias):
    """sums_i - sums_j for query i and key j: what is forgotten in between (FoX)."""

    per_sequence = True

    sums: Tensor  # (B, H, T) fp32, running sums of the log forget gates
    beside_sinks: bool = False  # whether something that is not lowered stands in the denominators, too

    def of(self, tile: Tile, batch: slice) -> Tensor:
        sums = self.sums[batch, tile.heads]
        return sums[..., tile.queries, None] - sums[..., None, tile.keys]

    def pull(self, sums: list[Tensor], tile: Tile, batch: slice, grad: Tensor) -> None:
        sums[0][batch, tile.heads, tile.keys] -= grad.sum(-2, dtype=sums[0].dtype)
        if self.beside_sinks:  # else softmax does not see what a whole row shares, so sums_i itself receives nothing
            sums[0][batch, tile.heads, tile.queries] += grad.sum(-1, dtype=sums[0].dtype)


@dataclasses.dataclass(frozen=True)
class Slopes(Bias):
    """-(i - j)·(queries_i + keys_j): a penalty linear in distance, at a slope that both ends set (GRAPE-A)."""

    per_sequence = True

    queries: Tensor  # (B, H, T) fp32
    keys: Tensor  # likewise

    def of(self, tile: Tile, batch: slice) -> Tensor:
        queries, keys = self.queries[batch, tile.heads, tile.queries], self.keys[batch, tile.heads, tile.keys]
        _, distance = _places(tile, queries.device)
        return -distance * (queries[..., None] + keys[..., None, :])

    def pull(self, sums: list[Tensor], tile: Tile, batch: slice, grad: Tensor) -> None:
        weighted = grad.to(sums[0].dtype) * _places(tile, grad.device)[1]
        sums[0][batch, tile.heads, tile.queries] -= weighted.sum(-1)
        sums[1][batch, tile.heads, tile.keys] -= weighted.sum(-2)


@dataclasses.dataclass(frozen=True)
class Curves(Bias):
    """mixtures_i · curves at distance i - j, 0 from distance K on: each query mixes curves of its own (Inkling).

    So may each key, of other curves, for whoever asks it; the two are added (DeBERTa).
    """

    per_sequence = True

    mixtures: Tensor  # (B, H, T, C) fp32
    curves: Tensor  # (1|H, C, K) fp32, at the distances 0 .. K-1
    of_keys: Tensor | None = None  # what keys mix, as `mixtures`
    key_curves: Tensor | None = None  # of these, as `curves`

    def of(self, tile: Tile, batch: slice) -> Tensor:
        rows, keys = tile.mask.shape
        (mixtures, curves), *others = self._part(self.tensors, tile, batch)
        bias = _slanted(mixtures @ _falling(curves, rows, keys), keys)
        for mixtures, curves in others:
            rising = _rising(curves, rows, keys)
            told = [_slanted(mixtures[..., some, :] @ rising[..., of], rows) for some, of in _key_blocks(rows, keys)]
            bias = bias + torch.cat(told, dim=-2).mT
        return bias

    def pull(self, sums: list[Tensor], tile: Tile, batch: slice, grad: Tensor) -> None:
        rows, keys = tile.mask.shape
        (mixtures, curves), *others = self._part(self.tensors, tile, batch)
        (of_mixtures, of_curves), *of_others = self._part(sums, tile, batch)
        wide = _slanted_gradient(grad, of_mixtures)
        for total, part in zip((of_mixtures, of_curves), _curves_pulled(wide, mixtures, curves, keys), strict=True):
            total += part
        for (mixtures, curves), (of_mixtures, of_curves) in zip(others, of_others, strict=True):
            rising = _rising(curves, rows, keys)
            of_rising = torch.zeros_like(rising)
            for some, of in _key_blocks(rows, keys):
                wide = _slanted_gradient(grad[..., some].mT, of_mixtures)
                of_mixtures[..., some, :] += wide @ rising[..., of].mT
                of_rising[..., of] += (mixtures[..., some, :].mT @ wide).sum(0).sum_to_size(rising[..., of].shape)
            near = min(keys, curves.shape[-1])
            of_curves[..., :near] += of_rising[..., rows - 1 : rows - 1 + near]

    def _part(self, tensors: Sequence[Tensor], tile: Tile, batch: slice) -> list[tuple[Tensor, Tensor]]:
        """What a tile's queries mix, and of which curves; then, if there is such a thing, its keys."""
        places = (tile.queries, tile.keys)
        return [
            (mixtures[batch, tile.heads, where], curves[tile.heads] if len(curves) > 1 else curves)
            for mixtures, curves, where in zip(tensors[::2], tensors[1::2], places, strict=False)
        ]


def _rising(curves: Tensor, rows: int, keys: int) -> Tensor:
    """Curves (1|H, C, K) at the distances 1 - Tq .. Tk - 1: (1|H, C, Tq + Tk - 1), 0 below 0 and beyond their end."""
    near = curves[..., :keys]
    return F.pad(near, (rows - 1, keys - near.shape[-1]))


def _falling(curves: Tensor, rows: int, keys: int) -> Tensor:
    """The same for falling distances."""
    return _rising(curves, rows, keys).flip(-1)


def _curves_pulled(grad: Tensor, mixtures: Tensor, curves: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """Gradients of mixtures (B, H, T, C) and of curves, from the gradient of mixtures times `_falling`."""
    near = min(keys, curves.shape[-1])
    each = mixtures.mT @ grad[..., keys - near : keys]  # by head, so that threads do not change a bit
    of_curves = each.sum(0).sum_to_size(*curves.shape[:2], near).flip(-1)
    own = grad @ _falling(curves, grad.shape[-1] - keys + 1, keys).mT
    return own, F.pad(of_curves, (0, curves.shape[-1] - near))


def _key_blocks(rows: int, keys: int) -> list[tuple[slice, slice]]:
    """Keys by blocks of as many as there are queries, and the distances, from 1 - Tq on, that a block needs.

    All at once, a key's curves would be made for all distances, of which `rows` are asked for.
    """
    starts = range(0, keys, rows)
    ends = [min(keys, start + rows) for start in starts]
    return [
        (slice(start, end), slice(keys - end, keys - start + rows - 1)) for start, end in zip(starts, ends, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class LaidOut(Bias):
    """Any bias that is small enough to be held for all pairs."""

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


@dataclasses.dataclass(frozen=True)
class Dense(Bias):
    """Any bias that all sequences share (FIRE), computed for a block of query rows at a time, and again backwards."""

    whole_heads: ClassVar[bool] = True

    # Distances (Tq, Tk), the queries' positions (Tq,) and the parameters to the bias (H, Tq, Tk), fp32.
    function: Callable[..., Tensor]
    parameters: tuple[Tensor, ...]  # what the function depends on and gradients go to
    # The bias of queries below this position (a tensor) depends on the distance alone; None: that of no query does.
    uniform_below: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.parameters

    def of(self, tile: Tile, batch: slice) -> Tensor:
        return self._rows(tile, self.parameters)

    def pull(self, sums: list[Tensor], tile: Tile, batch: slice, grad: Tensor) -> None:
        with torch.enable_grad():
            parameters = [tensor.detach().requires_grad_() for tensor in self.parameters]
            bias = self._rows(tile, parameters)
        for total, part in zip(sums, torch.autograd.grad(bias, parameters, grad.to(bias.dtype)), strict=True):
            total += part

    def laid_out(self, length: int) -> Tensor:
        """The bias of all pairs (..., H, T, T), hidden ones as at distance 0; autograd goes through it."""
        where = torch.arange(length, device=self.parameters[0].device)
        return self.function((where[:, None] - where).clamp(min=0), where, *self.parameters).float()

    def _rows(self, tile: Tile, parameters: Sequence[Tensor]) -> Tensor:
        where, distance = _places(tile, parameters[0].device)
        if tile.queries.stop - 1 < self._uniform_below:  # then the last row, backwards, says it all
            shared = self.function(distance[-1:].flip(-1), where[-1:], *parameters)
            return by_distance(shared[:, 0], len(where))
        return self.function(distance, where, *parameters)

    @functools.cached_property
    def _uniform_below(self) -> float:
        """Read once per call, and only if the host need not wait for a device."""
        if self.uniform_below is None or self.uniform_below.device.type != "cpu":
            return -math.inf
        return float(self.uniform_below.detach())


def _places(tile: Tile, device: torch.device) -> tuple[Tensor, Tensor]:
    """Positions of a tile's queries (Tq,), and their distances from its keys (Tq, Tk), 0 for hidden ones."""
    where = torch.arange(tile.queries.start, tile.queries.stop, device=device)
    return where, (where[:, None] - torch.arange(tile.keys.start, tile.keys.stop, device=device)).clamp(min=0)


@dataclasses.dataclass(frozen=True)
class Near:
    """Vectors by distance that keys and values carry (Shaw et al.): softmax(scale q·(k + a)) (v + b).

    Row 0 of K + 1 serves all distances from K on, row r the distance K - r.
    """

    keys: Tensor  # a: (K + 1, Dh)
    values: Tensor | None = None  # b, likewise; None = values carry none


@dataclasses.dataclass(frozen=True)
class Sunk:
    """A logit per head that joins the denominator of every row's softmax and has no value, beside what is added."""

    sinks: Tensor  # (H,) fp32
    added: Bias


Added = Bias | Near | Sunk  # all that an encoding may declare of what attention is beside q·k
