"""Causal attention with learned vectors for the nearest distances, on keys and on values (Shaw et al.).

    logits_ij = scale q_i·(k_j + a_(i-j)),   output_i = sum over j of p_ij (v_j + b_(i-j)),   a_r = b_r = 0 for r >= K

A vector that is the same at all distances changes no softmax and adds itself to the output, so whoever has one more
vector for everything beyond K passes the differences to that one here. What is left touches only the K nearest keys: a
band of each tile, reached through a strided view, so the (T, T, D) and even the (T, T) tensors of Shaw's formula are
never built.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from posbench.kernels.tiles import Cut, KeyGradient, Tile, exact, flat, product, softmax_backward, unflat


def banded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    near_keys: Tensor,
    near_values: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal attention whose K nearest keys carry vectors by distance; otherwise as `tiled_attention`.

    Args:
        q, k, v: queries, keys, values (B, H, T, Dh), of one dtype; so is the result.
        near_keys: (K, Dh), added to keys at the distances K-1 .. 0, in that order.
        near_values: (K, Dh), likewise added to values.
    """
    if near_values is None:
        near_values = near_keys.new_zeros(near_keys.shape)
    train = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, near_keys, near_values))
    cut = Cut(q.detach(), window)
    call = _Call(cut, scale, keep=train and cut.is_kept())
    out: Tensor = _Banded.apply(call, q, k, v, near_keys, near_values)  # type: ignore[no-untyped-call]
    return out


@dataclasses.dataclass(frozen=True)
class _Call:
    cut: Cut
    scale: float
    keep: bool  # hold the probabilities for the backward pass

    def probabilities(self, q: Tensor, k: Tensor, near: Tensor, mask: Tensor) -> Tensor:
        """Softmax of a tile's logits, from its queries and its keys."""
        logits = torch.add(mask, product(q, k.mT), alpha=self.scale)
        _add_near(logits, q @ near.mT, self.scale)
        return torch.softmax(logits, -1).to(q.dtype)


class _Banded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, q: Tensor, k: Tensor, v: Tensor, near_k: Tensor, near_v: Tensor) -> Tensor:
        q, k, v = flat(q), flat(k), flat(v)
        out = torch.empty_like(q)
        kept: list[Tensor] = []
        with torch.autocast(q.device.type, enabled=False):
            near_k, near_v = near_k.to(q.dtype), near_v.to(q.dtype)
            # What the last block frees, the largest, serves all others; growing, each would take new memory.
            for tile in call.cut.tiles(last_first=not call.keep):
                of_keys, of_values = _within(tile, near_k), _within(tile, near_v)
                for part in map(tile.part, tile.batches):
                    probabilities = call.probabilities(q[part, tile.queries], k[part, tile.keys], of_keys, tile.mask)
                    product(probabilities, v[part, tile.keys], out=out[part, tile.queries])
                    near = _near(probabilities, len(of_values))
                    _add_product(out[part, tile.queries], near, of_values)
                    if call.keep:
                        kept += probabilities, near
        ctx.call = call
        ctx.save_for_backward(q, k, v, near_k, near_v, *kept)
        return unflat(out, call.cut.like)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        q, k, v, near_k, near_v, *kept = ctx.saved_tensors
        grad_out = flat(grad_out)
        blocks = len(call.cut.blocks())
        dq, dk, dv = torch.empty_like(q), KeyGradient(k, blocks), KeyGradient(v, blocks)
        sum_k, sum_v = (torch.zeros_like(x, dtype=exact(x)) for x in (near_k, near_v))
        remaining = iter(kept)
        with torch.autocast(q.device.type, enabled=False):
            for tile in call.cut.tiles():
                of_keys, of_values = _within(tile, near_k), _within(tile, near_v)
                for part in map(tile.part, tile.batches):
                    rows, keys, above = q[part, tile.queries], k[part, tile.keys], grad_out[part, tile.queries]
                    if call.keep:
                        probabilities, near = next(remaining), next(remaining)
                    else:
                        probabilities = call.probabilities(rows, keys, of_keys, tile.mask)
                        near = _near(probabilities, len(of_values))
                    grad = product(above, v[part, tile.keys].mT)
                    _add_near(grad, above @ of_values.mT)
                    grad = softmax_backward(grad, probabilities)
                    near_grad = _near(grad, len(of_keys))
                    product(grad, keys, call.scale, out=dq[part, tile.queries])
                    _add_product(dq[part, tile.queries], near_grad, of_keys, call.scale)
                    dk.add(part, tile.keys, grad.mT, rows, call.scale)
                    dv.add(part, tile.keys, probabilities.mT, above)
                    _within(tile, sum_k).add_(_over_all_rows(near_grad, rows), alpha=call.scale)
                    _within(tile, sum_v).add_(_over_all_rows(near, above))
        of_q, of_k, of_v = (unflat(x, call.cut.like) for x in (dq, dk.result(), dv.result()))
        return None, of_q, of_k, of_v, sum_k, sum_v


# -- the band: a tile's scores (sequences heads, rows, keys) at the distances K-1 .. 0 ---------------------------------


def _within(tile: Tile, near: Tensor) -> Tensor:
    """The part of (K, ...), for the distances K-1 .. 0, that a tile has."""
    return near[-tile.mask.shape[1] :]


def _band(x: Tensor, near: int) -> Tensor:
    """View (sequences heads, rows - 1, near) of a contiguous tile: all rows' nearest keys but the first row's.

    What lies before the first key is taken from the end of the row above, where that row's hidden keys are: their
    probabilities and gradients are 0, and what is added to them has no effect.
    """
    count, rows, keys = x.shape
    first = (keys + 1) + (keys - rows) - (near - 1)  # the second row's farthest
    return x.as_strided((count, rows - 1, near), (rows * keys, keys + 1, 1), first)


def _first_row(x: Tensor, near: int) -> Tensor:
    """View (sequences heads, up to near): the first row's nearest keys, as far as there are any."""
    own = x.shape[2] - x.shape[1]
    return x[:, 0, max(0, own - near + 1) : own + 1]


def _near(x: Tensor, near: int) -> Tensor:
    """The band of a tile, (sequences heads, rows, near); 0 where there is no key."""
    found = x.new_empty(*x.shape[:2], near)
    found[:, 1:] = _band(x, near)
    first = _first_row(x, near)
    found[:, 0, : near - first.shape[1]] = 0
    found[:, 0, near - first.shape[1] :] = first
    return found


def _add_near(x: Tensor, added: Tensor, scale: float = 1.0) -> None:
    """Add scale times (sequences heads, rows, near) to the band of a tile."""
    near = added.shape[2]
    band, first = _band(x, near), _first_row(x, near)
    if x.dtype == added.dtype:  # where torch adds bf16 in strides, it does so one by one
        band.copy_(band.contiguous().add_(added[:, 1:], alpha=scale))
    else:
        band.add_(added[:, 1:], alpha=scale)
    first.add_(added[:, 0, near - first.shape[1] :], alpha=scale)


def _add_product(x: Tensor, near: Tensor, vectors: Tensor, scale: float = 1.0) -> None:
    """Add scale times near (sequences heads, rows, K) @ vectors (K, Dh) to x, rounded once."""
    torch.baddbmm(x, near, vectors.expand(len(near), -1, -1), alpha=scale, out=x)


def _over_all_rows(a: Tensor, b: Tensor) -> Tensor:
    """aᵀ b over all sequences, heads and rows: (columns of a, columns of b)."""
    return a.flatten(0, -2).mT @ b.flatten(0, -2)
