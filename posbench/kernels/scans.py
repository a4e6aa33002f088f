"""Sums along rows of scores, in one pass on CPUs that have the kernels in C++ (`native`): for encodings whose logits or
weights depend on what lies between a query and a key. What they compute is written down where they are used.

Rows are contiguous fp32, (B, H, Tq, Tk).
"""

from ctypes import c_int64
from typing import Any

import torch
from torch import Tensor

from posbench.kernels.library import built
from posbench.kernels.native import pointer, reads


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
