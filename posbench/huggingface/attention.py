"""Attention narrowed to a window and sinks, in models of transformers.

The library's masks are narrowed where it makes them, so a layer's own window, chunk or sink stays. A narrowed mask has
T x T numbers.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from posbench.huggingface.package import transformers

_narrowed: contextvars.ContextVar[tuple[int | None, int]] = contextvars.ContextVar("narrowed", default=(None, 0))


@contextlib.contextmanager
def narrowed(window: int | None, sinks: int) -> Iterator[None]:
    """Within it, a query sees only its window (itself included) and the first `sinks` keys; None = no window."""
    token = _narrowed.set((window, sinks))
    try:
        yield
    finally:
        _narrowed.reset(token)


@functools.cache  # once, or masks would be narrowed twice
def register() -> None:
    """Have the library narrow its masks."""
    masks = transformers().AttentionMaskInterface
    for name in ("sdpa", "eager"):
        masks.register(name, functools.partial(_mask, masks()[name]))


def _mask(own: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The library's own mask; within `narrowed` also of the window and sinks."""
    window, sinks = _narrowed.get()
    if window is None:
        return own(*args, **options)
    from transformers.masking_utils import and_masks, causal_mask_function

    def near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query - key < window) | (key < sinks)

    seen = and_masks(options.pop("mask_function", causal_mask_function), near)
    return own(*args, **{**options, "mask_function": seen, "allow_is_causal_skip": False})
