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
import torch.nn.functional as F
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
    """Causal attention whose K nearest keys carry vectors by distance.

    Args:
        q, k, v: queries, keys, values (B, H, T, Dh), of one dtype.
        scale: what every product with q is multiplied by.
        near_keys: (K, Dh), added to keys at the distances K-1 .. 0, in that order.
        near_values: (K, Dh), likewise added to values.
        window: keys a query may see, itself included; None = all before it.

    Returns:
        (B, H, T, Dh) in the same dtype.
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
        """Softmax of a tile's logits, from its queries and its padded keys."""
        logits = torch.add(mask, product(q, k.mT), alpha=self.scale)
        _band(logits, len(near)).add_(q @ near.mT, alpha=self.scale)
        return torch.softmax(logits, -1).to(q.dtype)


class _Banded(torch.autograd.Function):
    # Every tile gets K - 1 keys more on the left, hidden, so that the band of its first rows has somewhere to be.

    @staticmethod
    def forward(ctx: Any, call: _Call, q: Tensor, k: Tensor, v: Tensor, near_k: Tensor, near_v: Tensor) -> Tensor:
        q, k, v = flat(q), flat(_padded(k, len(near_k))), flat(_padded(v, len(near_k)))
        out = torch.empty_like(q)
        kept: list[Tensor] = []
        with torch.autocast(q.device.type, enabled=False):
            near_k, near_v = near_k.to(q.dtype), near_v.to(q.dtype)
            for tile in call.cut.tiles():
                keys, mask = _padded_keys(tile, len(near_k)), _padded_mask(tile, len(near_k))
                for part in map(tile.part, tile.batches):
                    probabilities = call.probabilities(q[part, tile.queries], k[part, keys], near_k, mask)
                    product(probabilities, v[part, keys], out=out[part, tile.queries])
                    out[part, tile.queries] += _band(probabilities, len(near_v)) @ near_v
                    if call.keep:
                        kept.append(probabilities)
        ctx.call = call
        ctx.save_for_backward(q, k, v, near_k, near_v, *kept)
        return unflat(out, call.cut.like)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        q, k, v, near_k, near_v, *kept = ctx.saved_tensors
        grad_out = flat(grad_out)
        near, blocks = len(near_k), len(call.cut.blocks())
        dq, dk, dv = torch.empty_like(q), KeyGradient(k, blocks), KeyGradient(v, blocks)
        sum_k, sum_v = (torch.zeros_like(x, dtype=exact(x)) for x in (near_k, near_v))
        remaining = iter(kept)
        with torch.autocast(q.device.type, enabled=False):
            for tile in call.cut.tiles():
                keys, mask = _padded_keys(tile, near), _padded_mask(tile, near)
                for part in map(tile.part, tile.batches):
                    rows, above = q[part, tile.queries], grad_out[part, tile.queries]
                    probabilities = (
                        next(remaining) if call.keep else call.probabilities(rows, k[part, keys], near_k, mask)
                    )
                    grad = product(above, v[part, keys].mT)
                    _band(grad, near).add_(above @ near_v.mT)
                    grad = softmax_backward(grad, probabilities)
                    near_grad = _band(grad, near)
                    product(grad, k[part, keys], call.scale, out=dq[part, tile.queries])
                    dq[part, tile.queries].add_(near_grad @ near_k, alpha=call.scale)
                    dk.add(part, keys, grad.mT, rows, call.scale)
                    dv.add(part, keys, probabilities.mT, above)
                    sum_k.add_(_over_all_rows(near_grad, rows), alpha=call.scale)
                    sum_v.add_(_over_all_rows(_band(probabilities, near), above))
        of_q, of_k, of_v = (unflat(x, call.cut.like) for x in (dq, dk.result(), dv.result()))
        return None, of_q, of_k[:, :, near - 1 :], of_v[:, :, near - 1 :], sum_k, sum_v


def _band(x: Tensor, near: int) -> Tensor:
    """View (sequences heads, rows, near) of a contiguous, padded tile: each row's keys at distances near-1 .. 0."""
    count, rows, width = x.shape
    first = width - near + 1 - rows  # column of the first row's farthest near key
    return x.as_strided((count, rows, near), (rows * width, width + 1, 1), first)


def _padded(x: Tensor, near: int) -> Tensor:
    return F.pad(x, (0, 0, near - 1, 0))


def _padded_mask(tile: Tile, near: int) -> Tensor:
    return F.pad(tile.mask, (near - 1, 0), value=-torch.inf)


def _padded_keys(tile: Tile, near: int) -> slice:
    return slice(tile.keys.start, tile.keys.stop + near - 1)


def _over_all_rows(a: Tensor, b: Tensor) -> Tensor:
    """aᵀ b over all sequences, heads and rows: (columns of a, columns of b)."""
    return a.flatten(0, -2).mT @ b.flatten(0, -2)
