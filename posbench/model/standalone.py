"""Attention under an encoding, for models that are not posbench's: `posbench.attention`, and its definition."""

import torch
from torch import Tensor

from posbench.encodings.base import Encoding, Layer, check_length, exact
from posbench.errors import UserError
from posbench.model.attention import attention as attention_of_layer
from posbench.model.attention import logits_by_rows, make_layer, mask_of, narrower, prepared


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
    _check_inputs(encoding, q, k, v, x, layer, positions)
    if window is not None and (window < 1 or not causal):
        raise UserError(f"window is {window}: expected {'at least 1' if causal else 'None, or causal=True'}")
    half = (torch.bfloat16, torch.float16)
    if cast := next((t.dtype for t in [*encoding.parameters(), *encoding.buffers()] if t.dtype in half), None):
        raise UserError(
            f"'{encoding.name}' was cast to {cast}, in which its angles and biases are wrong: cast the model before "
            "the encoding is built"
        )
    described = _described(encoding, q, x, layer, positions, causal)
    return attention_of_layer(encoding, q, k, v, described, window, last=new if new < length else None)


def attention_logits(
    encoding: Encoding,
    q: Tensor,
    k: Tensor,
    x: Tensor | None = None,
    layer: int = 0,
    positions: Tensor | None = None,
    causal: bool = True,
    last: int | None = None,
) -> Tensor:
    """Logits of one attention layer under `encoding`, before softmax, by the definition in fp32.

    Args:
        encoding: of the whole model; `layer` says where in it.
        q: raw (un-rotated) queries (B, H, T, Dh).
        k: raw keys (B, Hkv, T, Dh); each of their heads serves a group of queries' heads.
        x: the layer's normalised input (B, T, D), for encodings that look at it. An encoding with `embed` needs it,
            too: q, k and v carry what `embed` added only if they were computed from such an x.
        layer: which layer's parameters to use, from 0. Pass it in every layer: nothing tells if it is left out.
        positions: (T,), (1, T) or (B, T); default 0 .. T-1, if the encoding does not choose positions by itself.
        causal: hide keys after the query.
        last: only the last so many query rows; None = all T.

    Returns:
        (B, H, last or T, T) fp32, or fp64 for fp64 inputs: scaled, biased, -inf where masked.

    Raises:
        UserError: a shape or the layer does not fit the encoding, the encoding needs `x` or `positions` and they are
            None, or the input is longer than the encoding is defined for.
    """
    return _by_definition(encoding, q, k, None, x, layer, positions, causal, last)


def attention_output(
    encoding: Encoding,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor | None = None,
    layer: int = 0,
    positions: Tensor | None = None,
    causal: bool = True,
    last: int | None = None,
) -> Tensor:
    """Output of one attention layer by the definition: (B, H, last or T, Dh) fp32.

    Arguments and errors are those of `attention_logits`; `v` are raw values, of the shape of `k`.
    """
    return _by_definition(encoding, q, k, v, x, layer, positions, causal, last)


def _by_definition(
    encoding: Encoding,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    x: Tensor | None,
    layer: int,
    positions: Tensor | None,
    causal: bool,
    last: int | None,
) -> Tensor:
    """Return logits, or outputs of values, in one block of rows without any kernel but products and the softmax."""
    _check_inputs(encoding, q, k, k if v is None else v, x, layer, positions)
    with torch.autocast(q.device.type, enabled=False):
        described = _described(encoding, q, x, layer, positions, causal)
        values = exact(k if v is None else v)
        encoding, q, k, values, block = whole_block(encoding, exact(q), exact(k), values, described, last=last)
        logits = logits_by_rows(encoding, q, k, block, encoding.window if causal else None)
        return logits if v is None else encoding.map_outputs(encoding.attend(logits, values, block), block)


def whole_block(
    encoding: Encoding, q: Tensor, k: Tensor, v: Tensor, layer: Layer, window: int | None = None, sinks: int = 0,
    last: int | None = None,
) -> tuple[Encoding, Tensor, Tensor, Tensor, Layer]:  # fmt: skip
    """Return a layer's encoding and what its pairwise hooks get if the query rows are one block with all keys."""
    encoding, q, k, v, layer = prepared(encoding, q, k, v, layer)
    length = q.shape[2]
    rows = slice(length - (last or length), length)
    layer = layer.replace(rows=rows, keys=slice(0, length), consecutive=False)
    window = narrower(window, encoding.window) if layer.causal else None
    visible = mask_of(layer, window, sinks, exact(q).dtype) == 0
    return encoding, q[:, :, rows], k, v, layer.replace(visible=visible)


def _described(
    encoding: Encoding, q: Tensor, x: Tensor | None, layer: int, positions: Tensor | None, causal: bool
) -> Layer:
    """Return what hooks read of a layer, from positions as a caller gives them."""
    consecutive = positions is None
    if positions is None:
        positions = torch.arange(q.shape[2], device=q.device)
    if positions.dim() == 1:
        positions = positions[None]
    return make_layer(encoding, positions, layer, x, consecutive, causal)


def _check_inputs(
    encoding: Encoding, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None, layer: int, positions: Tensor | None
) -> None:
    """Raise UserError for inputs that would raise a raw error or leave the encoding out."""
    shape, name = encoding.shape, encoding.name
    if q.dim() != 4 or q.shape[1] != shape.n_heads or q.shape[3] != shape.head_dim:
        hint = ", so q.transpose(1, 2)" if q.dim() == 4 and q.shape[2:] == (shape.n_heads, shape.head_dim) else ""
        raise UserError(
            f"q is {tuple(q.shape)}: expected (B, H, T, Dh), here (B, {shape.n_heads}, T, {shape.head_dim}){hint}"
        )
    batch, heads, length, _ = q.shape
    for what, given in (("k", k), ("v", v)):
        fits = given.dim() == 4 and (given.shape[0], given.shape[2]) == (batch, length) and given.shape[1] > 0
        if not fits or given.shape[3] != q.shape[3] or heads % given.shape[1]:
            raise UserError(
                f"{what} is {tuple(given.shape)}: expected that of q, {tuple(q.shape)}, or with fewer heads"
            )
    if not 0 <= layer < shape.n_layers:
        raise UserError(f"layer is {layer}: expected 0 to {shape.n_layers - 1} for this '{name}'")
    if x is not None and x.shape != (batch, length, shape.d_model):
        raise UserError(f"x is {tuple(x.shape)}: expected (B, T, D), here {(batch, length, shape.d_model)}")
    if positions is not None and positions.shape not in ((length,), (1, length), (batch, length)):
        raise UserError(f"positions is {tuple(positions.shape)}: expected {(length,)} or {(batch, length)}")
    check_length(encoding, length)  # more to the point than what is still missing
    if x is None and "embed" in encoding.hooks:
        raise UserError(
            f"'{name}' acts on the model's input: compute q, k, v from encoding.embed(embeddings, positions, ids) and "
            "pass the layer's input as x"
        )
    if positions is None and "positions" in encoding.hooks:
        raise UserError(f"'{name}' chooses positions by itself: pass positions=encoding.positions(ids, None)")


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
