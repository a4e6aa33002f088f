"""Small functions between the kernels, compiled if a run asks for it.

A whole model is not compiled. The compiler cannot see into hand-written kernels, and without them attention is slower
than what it gains elsewhere; a piece per block instead is one graph however many blocks there are, takes seconds to
compile, and leaves attention as it is for every encoding.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, library

from posbench.kernels.on_cuda import fused

_Given = ParamSpec("_Given")
_Out = TypeVar("_Out")

_fusing = contextvars.ContextVar("fusing", default=False)


def fusing() -> contextlib.AbstractContextManager[None]:
    """Run `fusible` functions compiled while this lasts."""
    return fused_if(True)


@contextlib.contextmanager
def fused_if(wanted: bool) -> Iterator[None]:
    """Run `fusible` functions compiled while this lasts, or as they are."""
    token = _fusing.set(wanted)
    try:
        yield
    finally:
        _fusing.reset(token)


def is_fusing() -> bool:
    """Whether `fusible` functions run compiled here."""
    return _fusing.get()


def fusible(dynamic: bool = False) -> Callable[[Callable[_Given, _Out]], Callable[_Given, _Out]]:
    """Compile a function at its first call within `fusing`; warn once if that fails.

    Args:
        dynamic: one graph for all shapes, rather than one for each of a few.
    """

    def decorate(function: Callable[_Given, _Out]) -> Callable[_Given, _Out]:
        compiled = fused(function, dynamic)

        @functools.wraps(function)
        def call(*args: _Given.args, **kwargs: _Given.kwargs) -> _Out:
            return (compiled if _fusing.get() else function)(*args, **kwargs)

        return call

    return decorate


def gelu(x: Tensor) -> Tensor:
    """GELU in its exact form. On CPUs the compiler's own takes twice as long as torch's, so it is kept from it."""
    if torch.compiler.is_compiling() and x.device.type == "cpu":
        return _gelu(x)  # type: ignore[no-any-return]
    return F.gelu(x)


@library.custom_op("posbench::gelu", mutates_args=())
def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x)


@library.custom_op("posbench::gelu_backward", mutates_args=())
def _gelu_backward(gradient: Tensor, x: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward(gradient.contiguous(), x)  # type: ignore[no-any-return]


def _like(*tensors: Tensor) -> Tensor:
    return torch.empty_like(tensors[-1])


def _keep(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


_gelu.register_fake(_like)
_gelu_backward.register_fake(_like)
_gelu.register_autograd(lambda ctx, gradient: _gelu_backward(gradient, *ctx.saved_tensors), setup_context=_keep)
