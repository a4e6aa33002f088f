"""Functions of plain torch operations that CUDA runs as one kernel: compiled there, and as they are elsewhere."""

import functools
import logging
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

logger = logging.getLogger(__name__)
_P = ParamSpec("_P")
_R = TypeVar("_R")


def compiled(function: Callable[_P, _R], dynamic: bool | None = None) -> Callable[_P, _R]:
    """The function as torch compiles it, with more graphs than it makes unasked before it leaves a function as it is.

    Args:
        dynamic: one graph for all shapes, or one for each of a few; None: one for the first, another for all others.
    """
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(function, dynamic=dynamic)


def fused(function: Callable[_P, _R], dynamic: bool | None = None) -> Callable[_P, _R]:
    """The function, compiled at its first call; where nothing can be compiled, it serves as it is, with one warning.

    Args:
        dynamic: as of `compiled`.
    """
    lazily = functools.cache(lambda: compiled(function, dynamic))
    failed = False

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        nonlocal failed
        if not failed:
            try:
                return lazily()(*args, **kwargs)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # of the compiler, of Triton, of a driver
                failed = True
                said = str(error).partition("\n")[0]
                logger.warning("%s cannot be compiled here: %s; it runs uncompiled", function.__name__, said)
        return function(*args, **kwargs)

    return call


def fused_on_cuda(function: Callable[Concatenate[Tensor, _P], _R]) -> Callable[Concatenate[Tensor, _P], _R]:
    """The function, `fused` where its first tensor is on CUDA."""
    there = fused(function)

    @functools.wraps(function)
    def call(first: Tensor, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        alone = first.device.type == "cuda" and not torch.compiler.is_compiling()
        return (there if alone else function)(first, *args, **kwargs)

    return call
