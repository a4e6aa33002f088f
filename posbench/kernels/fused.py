"""Functions of plain torch operations, compiled where a run asks for it, else run as they are.

A whole model is not compiled. The compiler cannot see into hand-written kernels, and without them attention is slower
than what it gains elsewhere; a piece per block instead is one graph however many blocks there are, takes seconds to
compile, and leaves attention as it is for every encoding.
"""

import contextlib
import contextvars
import functools
import logging
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch

logger = logging.getLogger(__name__)
# Not of the compiler: the kernel ran, its results may be half written, and after an assertion nothing runs any more.
_OF_THE_DEVICE = (torch.OutOfMemoryError, torch.AcceleratorError)
_P = ParamSpec("_P")
_R = TypeVar("_R")

_fusing = contextvars.ContextVar("fusing", default=False)


def fused(function: Callable[_P, _R], dynamic: bool | None = None) -> Callable[_P, _R]:
    """The function, compiled at its first call; uncompiled, with one warning, if that fails.

    Args:
        dynamic: one graph for all shapes, or one for each of a few; None: one for the first, another for all others.
    """
    failed = False

    @functools.cache
    def compiled() -> Callable[_P, _R]:
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)  # 8 by default
        return torch.compile(function, dynamic=dynamic)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        nonlocal failed
        if not failed:
            try:
                return compiled()(*args, **kwargs)
            except _OF_THE_DEVICE:
                raise
            except Exception as error:  # of the compiler, of Triton, of a driver
                failed = True
                said = str(error).partition("\n")[0]
                logger.warning("%s cannot be compiled here: %s; it runs uncompiled", function.__name__, said)
        return function(*args, **kwargs)

    return call


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
