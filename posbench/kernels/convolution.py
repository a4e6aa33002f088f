"""A causal convolution of each channel over a few tokens, which torch's own takes three times as long for on CPUs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def causal_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """Sum over s = 0 .. K-1 of weight_(K-1-s) x_(t-s), for x (B, T, C) and weights (C, K), the last for x_t itself."""
    return _Convolution.apply(x, weight)  # type: ignore[no-any-return, no-untyped-call]


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _sliding(F.pad(x, (0, 0, weight.shape[1] - 1, 0)), weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        length, width = x.shape[1], weight.shape[1]
        dx = _sliding(F.pad(above, (0, 0, 0, width - 1)), weight.flip(1))
        dweight = [(above[:, back:] * x[:, : length - back]).sum((0, 1)) for back in reversed(range(width))]
        return dx, torch.stack(dweight, dim=1)


def _sliding(x: Tensor, weight: Tensor) -> Tensor:
    """Sum over s of weight_s x_(t+s): (B, T, C) from x (B, T + K - 1, C)."""
    first, *others = weight.mT.contiguous()
    length = x.shape[1] - len(others)
    out: Tensor = x[:, :length] * first
    for ahead, other in enumerate(others, start=1):
        out += x[:, ahead : ahead + length] * other
    return out
