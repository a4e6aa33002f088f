"""Attention under an encoding, for models that are not posbench's: `posbench.attention`."""

import contextlib

import torch
from torch import Tensor

from posbench.encodings.base import Encoding, shared
from posbench.errors import UserError
from posbench.model.attention import dispatch
from posbench.model.attention.reference import by_sequence, check_inputs


def attention(
    encoding: Encoding,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor | None = None,
    layer: int = 0,
    x: Tensor | None = None,
    window: int | None = None,
    causal: bool = True,
) -> Tensor:
    """Attention of one layer under `encoding`, by the fastest kernel for it on this device.

    It replaces rotary embeddings, bias, softmax and `scaled_dot_product_attention` in a model of your own. On CPUs call
    `torch.set_flush_denormal(True)` at the start of your program, as posbench's commands do: biases that fall with
    distance make subnormal numbers in softmax, and these are slow.

    Args:
        encoding: of the whole model, as `posbench.build_encoding` returns it; a part of the model, kept in fp32.
        q: raw (un-rotated) queries (B, H, T, Dh). With a key-value cache only those of the last tokens.
        k: raw keys (B, Hkv, T, Dh) of all tokens; each of their heads serves a group of queries' heads.
        v: raw values, of the shape of `k`.
        positions: (T,), (1, T) or (B, T) of all tokens. None = 0 .. T-1, for which there are faster kernels.
        layer: which layer's parameters to use, from 0. Pass it in every layer: nothing tells if it is left out.
        x: the layer's normalised input, for encodings that look at it: (B, T, D), or only the rows of `q` if the
            encoding reads nothing else of earlier tokens.
        window: keys that a query may see, itself included; None = all before it.
        causal: hide keys after the query.

    Returns:
        (B, H, T, Dh) in v's dtype; as many rows as `q` has.

    Raises:
        UserError: a shape, the layer or the window does not fit, something that the encoding needs is missing, it
            needs more of earlier tokens than a key-value cache holds, or it was cast to 16 bits.
    """
    new, length = q.shape[-2], k.shape[-2]
    if 0 < new < length:
        _refuse_cache(encoding, x, new)
        q = _after_zeros(q, length)
        x = _after_zeros(x, length) if x is not None and x.shape[-2] == new else x
    check_inputs(encoding, q, k, v, x, layer, positions)
    if window is not None and (window < 1 or not causal):
        raise UserError(f"window is {window}: expected {'at least 1' if causal else 'None, or causal=True'}")
    if cast := next((t.dtype for t in [*encoding.parameters(), *encoding.buffers()] if _is_half(t)), None):
        raise UserError(
            f"'{encoding.name}' was cast to {cast}, in which its angles and biases are wrong: cast the model before "
            "the encoding is built"
        )
    consecutive, positions = positions is None, by_sequence(positions, q)
    if not torch.compiler.is_compiling():
        positions = shared(positions, consecutive)
    half = torch.autocast(q.device.type, q.dtype) if _is_half(q) else contextlib.nullcontext()
    with half:
        return dispatch.attention(
            encoding, q, k, v, x, positions, layer, window,
            consecutive=consecutive, last=new if new < length else None, causal=causal,
        )  # fmt: skip


def _refuse_cache(encoding: Encoding, x: Tensor | None, new: int) -> None:
    """Raise UserError if the last rows cannot be computed from keys and values that were kept."""
    why = None
    if encoding.length_dependent:
        why = "has other outputs for earlier tokens in a longer input"
    elif "q" in encoding.history:
        why = "reads queries of earlier tokens"
    if why:
        raise UserError(f"'{encoding.name}' {why}, so it has no key-value cache: pass q of all tokens")
    if "x" in encoding.history and x is not None and x.shape[-2] == new:
        raise UserError(
            f"'{encoding.name}' reads the input of earlier tokens: keep x beside keys and values, (B, T, D)"
        )


def _after_zeros(last: Tensor, length: int) -> Tensor:
    """The rows of the last tokens (..., Tq, C) behind rows of zeros, (..., length, C)."""
    return torch.cat([last.new_zeros(*last.shape[:-2], length - last.shape[-2], last.shape[-1]), last], dim=-2)


def _is_half(x: Tensor) -> bool:
    return x.dtype in (torch.bfloat16, torch.float16)
