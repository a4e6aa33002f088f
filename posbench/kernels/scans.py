"""Sums along rows of scores, in one pass on CPUs that have the kernels in C++ (`native`): for encodings whose logits or
weights depend on what lies between a query and a key. What they compute is written down where they are used.

Rows are contiguous fp32, (B, H, Tq, Tk).
"""

from ctypes import c_int64
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from posbench.kernels.native import Sizes, at, built, by_channel, like_by_token, pointer, reads, strided


def scans(scores: Tensor) -> bool:
    """Whether they serve for such rows."""
    return scores.dtype == torch.float32 and reads(scores)


def count(logits: Tensor, at_whole: Tensor, visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """CoPE's logits (B, H, Tq, Tk), gates and counts, from what whole positions give each query, (B, H, Tq, P), and
    what it sees, (Tq, Tk), 1 or 0."""
    logits, at_whole, visible = logits.contiguous(), at_whole.contiguous(), visible.contiguous()
    biased, gates, counts = (torch.empty_like(logits) for _ in range(3))
    heads = logits.shape[0] * logits.shape[1]
    sizes = (heads, *logits.shape[2:], at_whole.shape[-1])
    _run("count_rows", sizes, logits, at_whole, visible, biased, gates, counts)
    return biased, gates, counts


def uncount(gradient: Tensor, at_whole: Tensor, gates: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the logits and of what whole positions give."""
    gradient, at_whole = gradient.contiguous(), at_whole.contiguous()
    of_logits, of_whole = torch.empty_like(gradient), torch.empty_like(at_whole)
    sizes = (*_rows(gradient), at_whole.shape[-1])
    _run("uncount_rows", sizes, gradient, at_whole, gates, counts, of_logits, of_whole)
    return of_logits, of_whole


def counted_in_text(q: Tensor, k: Tensor, table: Tensor, scale: float) -> Tensor:
    """What CoPE adds to the logits of all pairs, for what `native.takes_text` says; products are of bf16 numbers.

    Args:
        q, k: (B, H, T, Dh) in bf16.
        table: the vectors of whole positions, (P, Dh).
        scale: what q·k is multiplied by.

    Returns:
        (B, H, T, T) fp32, 0 for keys after the query.
    """
    bias: Tensor = _CountedInText.apply(q, k, table, scale)  # type: ignore[no-untyped-call]
    return bias


class _CountedInText(torch.autograd.Function):
    """Nothing is kept but what is given."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, table: Tensor, scale: float) -> Tensor:
        q, k, half = by_channel(q), by_channel(k), table.to(q.dtype).contiguous()
        ctx.save_for_backward(q, k, half)
        ctx.scale, ctx.dtype = scale, table.dtype
        bias = q.new_empty(*q.shape[:3], q.shape[2], dtype=torch.float32)
        sizes = Sizes(*q.shape, len(table), scale=scale)
        scratch = sizes.scratch_of(built().scratch_of_count)
        built().count(at(sizes), strided(q), strided(k), pointer(half), pointer(bias))
        del scratch
        return bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        q, k, half = ctx.saved_tensors
        above = above.contiguous()
        dq, dk = like_by_token(q), like_by_token(k)
        of_table = q.new_empty(*q.shape[:2], *half.shape, dtype=torch.float32)
        sizes = Sizes(*q.shape, len(half), scale=ctx.scale)
        scratch = sizes.scratch_of(built().scratch_of_uncount)
        results = strided(dq), strided(dk), pointer(of_table)
        built().uncount(at(sizes), strided(q), strided(k), pointer(half), pointer(above), *results)
        del scratch
        return dq, dk, of_table.sum((0, 1)).to(ctx.dtype), None


def broken(z: Tensor) -> tuple[Tensor, Tensor]:
    """Shares of a stick that keys break off, the last one first, (B, H, Tq, Tk), and what is left, (B, H, Tq, 1)."""
    z = z.contiguous()
    weights, rest = torch.empty_like(z), z.new_empty(*z.shape[:-1], 1)
    _run("break_rows", _rows(z), z, weights, rest)
    return weights, rest


def unbroken(of_weights: Tensor, of_rest: Tensor, z: Tensor, weights: Tensor, rest: Tensor) -> Tensor:
    """Gradient of z."""
    of_weights, of_rest, z = of_weights.contiguous(), of_rest.contiguous(), z.contiguous()
    of_z = torch.empty_like(z)
    _run("unbreak_rows", _rows(z), of_weights, of_rest, z, weights, rest, of_z)
    return of_z


def _rows(scores: Tensor) -> tuple[int, int]:
    return scores.shape[:-1].numel(), scores.shape[-1]


def _run(name: str, sizes: tuple[int, ...], *tensors: Tensor) -> None:
    arguments: list[Any] = [c_int64(size) for size in (torch.get_num_threads(), *sizes)]
    getattr(built(), name)(*arguments, *(pointer(tensor) for tensor in tensors))
