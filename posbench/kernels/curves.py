"""A bias by `Curves` laid out for all pairs of a text, by the kernel in C++ (`curves.cpp`)."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from posbench.kernels.bias import Curves
from posbench.kernels.native import Sizes, Strided, at, by_channel, pointer


def laid_out(bias: Curves) -> Tensor:
    """What it adds to the logits: (B, H, T, T) fp32, anything for keys after the query.

    For what `native.holds_pairs` says, where there are the kernels; products are as good as of fp32, gradients as of
    bf16 numbers.
    """
    out: Tensor = _LaidOut.apply(*bias.tensors)  # type: ignore[no-untyped-call]
    return out


class _LaidOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        mixed = [by_channel(x.float()) for x in tensors[::2]]
        length = mixed[0].shape[2]
        curves = [x[..., :length].float().mT.contiguous() for x in tensors[1::2]]
        ctx.save_for_backward(*mixed, *curves)
        ctx.reach = [x.shape[-1] for x in tensors[1::2]]
        out = mixed[0].new_empty(*mixed[0].shape[:3], length)
        given = [_Mixing.of(*pair) for pair in zip(mixed, curves, strict=True)]
        _run("lay_out_curves", out, given)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, ...]:
        half = len(ctx.saved_tensors) // 2
        mixed, curves = ctx.saved_tensors[:half], ctx.saved_tensors[half:]
        above = above.contiguous()
        results = [
            (torch.empty_like(x), x.new_empty(*x.shape[:2], *y.shape[1:])) for x, y in zip(mixed, curves, strict=True)
        ]
        given = [_Mixing.of(x, y, *result) for x, y, result in zip(mixed, curves, results, strict=True)]
        _run("pull_curves", above, given)
        found: list[Tensor] = []
        for (of_mixed, each), own, reach in zip(results, curves, ctx.reach, strict=True):
            of_curves = each.sum(0).sum_to_size(own.shape).mT
            found += [of_mixed, F.pad(of_curves, (0, reach - of_curves.shape[-1]))]
        return tuple(found)


class _Mixing(ctypes.Structure):
    """As in the source."""

    _fields_ = [
        ("mixtures", Strided),
        ("curves", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("of_head", "channels", "reach")),
        ("of_mixtures", Strided),
        ("of_curves", ctypes.c_void_p),
    ]

    @classmethod
    def of(
        cls, mixtures: Tensor, curves: Tensor, of_mixtures: Tensor | None = None, of_curves: Tensor | None = None
    ) -> "_Mixing":
        """Curves are (1|H, K, C), by distance."""
        made = cls(Strided.of(mixtures), pointer(curves), curves.stride(0) if len(curves) > 1 else 0)
        made.reach, made.channels = curves.shape[1:]
        if of_mixtures is not None:
            made.of_mixtures, made.of_curves = Strided.of(of_mixtures), pointer(of_curves)
        return made


def _run(name: str, pairs: Tensor, given: Sequence[_Mixing]) -> None:
    sizes = Sizes(*pairs.shape[:3])
    sides = [at(given[0]), at(given[1]) if len(given) > 1 else None]
    sizes.run(name, *sides, pointer(pairs), sized_by=sides)
