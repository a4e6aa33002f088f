"""Attention narrowed to a window and sinks, in models of transformers.

Kinds that are verified have attention in blocks of queries, which also knows a cap on logits.

The library would make masks and scores of T x T. Here a block of queries meets only the keys that it can see, so that
memory and time grow with T times the window. Layers without window and cap use the library's own function.

All other kinds keep the library's attention. Its masks are narrowed where it makes them, so a layer's own window, chunk
or sink stays; a model that makes its masks elsewhere is not narrowed, which a probe finds.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.huggingface.package import transformers
from posbench.model.attention.reference import narrower

NAME = "posbench"  # the function's name in the library
SCORES = 2**25  # of one block, B x H x queries x keys
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
    """Register attention in blocks with the library, which then builds no masks for it, and narrow its other masks."""
    transformers().AttentionInterface.register(NAME, attend)
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


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention as the library calls it, of tokens 0 to T - 1.

    Args:
        query, key, value: (B, H, T, Dh); keys and values may have fewer heads, each for a group.
        attention_mask: must be None; the library makes no masks for this function.
        scaling: of the logits; None = 1 / sqrt(Dh).
        sliding_window: the layer's own window, which sinks do not widen.
        softcap: logits are capped at +-softcap by tanh.

    Returns:
        (B, T, H, Dh), and None instead of probabilities.
    """
    window, sinks = _narrowed.get()
    length = query.shape[2]
    reach = narrower(window, sliding_window)
    if attention_mask is not None or key.shape[2] != length:
        raise ValueError("attention in blocks takes whole texts, without padding and cache")
    if softcap is None and (reach is None or reach >= length):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, None, scaling=scaling, **options)
        return found
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    seen = length if reach is None else min(length, 2 * reach + sinks)
    block = max(16, min(length, reach or length, SCORES // (len(query) * query.shape[1] * seen)))
    positions = torch.arange(length, device=query.device)
    out = query.new_empty(*query.shape[:3], value.shape[-1])
    for start in range(0, length, block):
        rows = slice(start, min(length, start + block))
        first = 0 if reach is None else max(0, start - reach + 1)
        sunk = min(sinks, first)
        k, v = (_keys(x, sunk, first, rows.stop, query.shape[1]) for x in (key, value))
        there = torch.cat((positions[:sunk], positions[first : rows.stop]))
        distance = positions[rows, None] - there
        visible = distance >= 0
        if window is not None:
            visible &= (distance < window) | (there < sinks)
        if sliding_window is not None:
            visible &= distance < sliding_window
        if softcap is None:
            out[:, :, rows] = F.scaled_dot_product_attention(query[:, :, rows], k, v, attn_mask=visible, scale=scale)
        else:
            logits = query[:, :, rows] @ k.transpose(2, 3) * scale
            logits = (softcap * torch.tanh(logits / softcap)).masked_fill(~visible, torch.finfo(logits.dtype).min)
            out[:, :, rows] = logits.softmax(dim=-1, dtype=torch.float32).to(query.dtype) @ v
    return out.transpose(1, 2).contiguous(), None


def _keys(x: Tensor, sunk: int, first: int, stop: int, heads: int) -> Tensor:
    """The sinks and a block's keys, repeated for every head: (B, H, sunk + stop - first, Dh)."""
    x = x[:, :, first:stop] if not sunk else torch.cat((x[:, :, :sunk], x[:, :, first:stop]), dim=2)
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
