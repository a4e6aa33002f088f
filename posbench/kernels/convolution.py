"""A causal convolution of each channel over a few tokens: in one pass by the kernel in C++ (`convolution.cpp`), or by
sums of torch's, whose own convolution takes three times as long as these on CPUs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from posbench.kernels.library import built
from posbench.kernels.native import LANES, Sizes, at, by_channel, pointer, reads, strided
from posbench.kernels.on_cuda import fused_on_cuda

_WIDEST = 16  # tokens, as in the source


def causal_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """Sum over s = 0 .. K-1 of weight_(K-1-s) x_(t-s), the last weight for x_t itself.

    Args:
        x: (B, T, C).
        weight: (C, K), in fp32 if x is in bf16.

    Returns:
        (B, T, C) in the dtype of x, each sum computed in that of the weights.
    """
    kernel = _Native if _serves(x, weight) else _Shifted
    return kernel.apply(x, weight)  # type: ignore[no-any-return, no-untyped-call]


def _serves(x: Tensor, weight: Tensor) -> bool:
    return (
        reads(x)
        and x.dtype in (torch.float32, torch.bfloat16)
        and weight.dtype == torch.float32
        and x.shape[2] % LANES == 0
        and weight.shape[1] <= _WIDEST
    )


class _Native(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x, by_token = by_channel(x), weight.mT.contiguous()
        ctx.save_for_backward(x, by_token)
        out = x.new_empty(x.shape)
        _run("convolve", x, len(by_token), _text(x), pointer(by_token), pointer(out))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, Tensor]:
        x, by_token = ctx.saved_tensors
        above, dx = by_channel(above), x.new_empty(x.shape)
        of_sequences = by_token.new_empty(len(x), *by_token.shape)
        results = pointer(dx), pointer(of_sequences)
        _run("unconvolve", x, len(by_token), _text(x), pointer(by_token), _text(above), *results)
        return dx, of_sequences.sum(0).mT


def _text(x: Tensor) -> Any:
    return strided(x[:, None])  # of one head


def _run(name: str, x: Tensor, width: int, *arguments: Any) -> None:
    batch, length, channels = x.shape
    sizes = Sizes(batch, 1, length, channels, width, threads=torch.get_num_threads())
    getattr(built(), f"{name}_{'floats' if x.dtype == torch.float32 else 'halves'}")(at(sizes), *arguments)


class _Shifted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _convolved(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, Tensor]:
        return _unconvolved(above, *ctx.saved_tensors)


@fused_on_cuda
def _convolved(x: Tensor, weight: Tensor) -> Tensor:
    return _sliding(F.pad(x, (0, 0, weight.shape[1] - 1, 0)), weight).to(x.dtype)


@fused_on_cuda
def _unconvolved(above: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    length, width = x.shape[1], weight.shape[1]
    dx = _sliding(F.pad(above, (0, 0, 0, width - 1)), weight.flip(1))
    x, upper = x.to(weight.dtype), above.to(weight.dtype)
    dweight = [(upper[:, back:] * x[:, : length - back]).sum((0, 1)) for back in reversed(range(width))]
    return dx.to(above.dtype), torch.stack(dweight, dim=1)


def _sliding(x: Tensor, weight: Tensor) -> Tensor:
    """Sum over s of weight_s x_(t+s), in the dtype of the weights: (B, T, C) from x (B, T + K - 1, C)."""
    first, *others = weight.mT.contiguous()
    length = x.shape[1] - len(others)
    out: Tensor = x[:, :length] * first
    for ahead, other in enumerate(others, start=1):
        out += x[:, ahead : ahead + length] * other
    return out
