"""Functions of plain torch operations, compiled to one kernel on CUDA or where a run asks for it, else run as they are.

A whole model is not compiled. The compiler cannot see into hand-written kernels, and without them attention is slower
than what it gains elsewhere; a piece per block instead is one graph however many blocks there are, takes seconds to
compile, and leaves attention as it is for every encoding.
"""

import contextlib
import contextvars
import functools
import logging
import os
from collections.abc import Callable, Iterator
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from posbench import files

logger = logging.getLogger(__name__)
# Not of the compiler: the kernel ran, its results may be half written, and after an assertion nothing runs any more.
_OF_THE_DEVICE = (torch.OutOfMemoryError, torch.AcceleratorError)
_P = ParamSpec("_P")
_R = TypeVar("_R")


def compiled(function: Callable[_P, _R], dynamic: bool | None = None) -> Callable[_P, _R]:
    """Compile a function by torch, which may make more graphs of it than torch's own limit of 8.

    Args:
        dynamic: one graph for all shapes, or one for each of a few; None: one for the first, another for all others.
    """
    _keep_privately()
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(function, dynamic=dynamic)


def _keep_privately() -> None:
    """Keep what torch and Triton compile in a folder that only this user can write to, unless a variable names one.

    By default they take a folder of /tmp with the user's name, whoever made it, and load code from it. Precompiled
    headers are always kept there, so they are switched off.
    """
    import torch._inductor.config
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    torch._inductor.config.cpp_cache_precompile_headers = False
    unset = (None, default_cache_dir())  # torch itself sets the variable, at its first import of the compiler
    told = [name for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR") if os.environ.get(name) not in unset]
    if len(told) < 2:
        folder = files.private_cache("compiled")
        for name in {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}.difference(told):
            os.environ[name] = str(folder / name.partition("_")[0].lower())


def fused(function: Callable[_P, _R], dynamic: bool | None = None) -> Callable[_P, _R]:
    """The function, `compiled` at its first call; uncompiled, with one warning, if that fails."""
    lazily = functools.cache(lambda: compiled(function, dynamic))
    failed = False

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        nonlocal failed
        if not failed:
            try:
                return lazily()(*args, **kwargs)
            except _OF_THE_DEVICE:
                raise
            except Exception as error:  # of the compiler, of Triton, of a driver
                failed = True
                said = str(error).partition("\n")[0]
                logger.warning("%s cannot be compiled here: %s; it runs uncompiled", function.__name__, said)
        return function(*args, **kwargs)

    return call


def fused_on_cuda(function: Callable[Concatenate[Tensor, _P], _R]) -> Callable[Concatenate[Tensor, _P], _R]:
    """The function, `fused` if its first tensor is on CUDA."""
    there = fused(function)

    @functools.wraps(function)
    def call(first: Tensor, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        alone = first.device.type == "cuda" and not torch.compiler.is_compiling()
        return (there if alone else function)(first, *args, **kwargs)

    return call


# -- where a run asks for it -------------------------------------------------------------------------------------------

_fusing = contextvars.ContextVar("fusing", default=False)


@contextlib.contextmanager
def fusing(wanted: bool = True) -> Iterator[None]:
    """Run `fusible` functions compiled while this lasts, or as they are."""
    token = _fusing.set(wanted)
    try:
        yield
    finally:
        _fusing.reset(token)


def is_fusing() -> bool:
    """Whether `fusible` functions run compiled here."""
    return _fusing.get()


def fusible(dynamic: bool = False) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Compile a function at its first call within `fusing`; warn once if that fails.

    Args:
        dynamic: one graph for all shapes, rather than one for each of a few.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        in_one = fused(function, dynamic)

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            return (in_one if _fusing.get() else function)(*args, **kwargs)

        return call

    return decorate
