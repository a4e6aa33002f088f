"""Compile a function, or run it uncompiled where that fails."""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch

logger = logging.getLogger(__name__)
# Errors of the device, not of the compiler: results may be half written, and after an
# assertion nothing runs any more.
_OF_THE_DEVICE = (torch.OutOfMemoryError, torch.AcceleratorError)
_P = ParamSpec("_P")
_R = TypeVar("_R")


def compiled(
    function: Callable[_P, _R], dynamic: bool | None = None, writes: bool = False
) -> Callable[_P, _R]:
    """Return the function, which is compiled at its first call; if that fails, it warns
    once and runs uncompiled, unless its inputs may have changed meanwhile.

    `dynamic`: True makes one graph for all shapes, False one per shape, None one for
    the first and one for the others. `writes`: it writes into its inputs; then it is
    compiled as a whole before it runs, and only an error of the compiler falls back to
    the plain function.
    """
    program: Callable[_P, _R] | None = None

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        nonlocal program
        if program is None:
            # 8 by default; each layer may have graphs of its own
            torch._dynamo.config.recompile_limit = max(
                256, torch._dynamo.config.recompile_limit
            )
            program = torch.compile(function, dynamic=dynamic, fullgraph=writes)
        inputs = [*args, *kwargs.values()]
        before = _versions(inputs)
        try:
            return program(*args, **kwargs)
        except _OF_THE_DEVICE:
            raise
        except Exception as error:  # from the compiler, Triton or a driver
            is_of_compiler = isinstance(error, torch._dynamo.exc.TorchDynamoException)
            may_have_run = writes and not is_of_compiler
            if program is function or may_have_run or _versions(inputs) != before:
                raise
            logger.warning(
                "%s cannot be compiled here: %s",
                function.__name__,
                str(error).partition("\n")[0],
            )
            program = function
            return function(*args, **kwargs)

    return call


def _versions(inputs: Sequence[object]) -> list[int]:
    """Return how often each tensor was written to; inference tensors cannot."""
    tensors = [item for item in inputs if isinstance(item, torch.Tensor)]
    return [tensor._version for tensor in tensors if not tensor.is_inference()]
