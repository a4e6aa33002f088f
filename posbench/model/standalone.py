"""Attention under an encoding, for models that are not posbench's: fast
(`posbench.attention`) or by definition.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from posbench.encodings.base import Encoding, Layer, check_length, exact
from posbench.errors import UserError
from posbench.model.attention import attention as attention_of_layer
from posbench.model.attention import (
    block_logits,
    make_layer,
    mask_of,
    prepared,
)


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
    """Return attention of one layer under `encoding`, by the fastest kernel for it on
    this device.

    It replaces rotary embeddings, bias, softmax and `scaled_dot_product_attention` in a
    model of your own. On CPUs call `torch.set_flush_denormal(True)` at the start of
    your program, as posbench's commands do: biases that fall with distance make
    subnormal numbers in softmax, and these are slow.

    Args:
        encoding: the whole model's, as `posbench.build_encoding` returns it: a part of
            the model, which stays in fp32.
        q: raw (un-rotated) queries (B, H, T, Dh). With a key-value cache, only those of
            the last tokens.
        k, v: raw keys and values (B, Hkv, T, Dh) of all tokens; each of their heads
            serves a group of query heads.
        positions: (T,), (1, T) or (B, T) of all tokens. None = 0 .. T-1, for which
            there are faster kernels.
        layer: which layer's parameters to use, from 0. Pass it in every layer: no error
            says that it was left out.
        x: the layer's normalised input, for encodings that read it: (B, T, D). The rows
            of `q` alone are enough if the encoding does not read the input of earlier
            tokens.
        window: keys that a query may see, itself included; None = all before it.
        causal: hide keys after the query.

    Returns:
        (B, H, T, Dh) in v's dtype; as many rows as `q` has.

    Raises:
        UserError: a shape, the layer or the window does not fit, an input that the
            encoding needs is missing, the encoding needs more of earlier tokens than a
            key-value cache holds, or the encoding was cast to 16 bits.
    """
    if window is not None and (window < 1 or not causal):
        raise UserError(f"window is {window}: expected at least 1, and causal=True")
    n_queries, length = q.shape[-2], k.shape[-2]
    last = None
    if 0 < n_queries < length:
        _refuse_cache(encoding, x, n_queries)
        last = n_queries
        # rows of zeros stand for earlier tokens, whose outputs nobody reads
        earlier = 0, 0, length - n_queries, 0
        q = F.pad(q, earlier)
        if x is not None and x.shape[-2] == n_queries:
            x = F.pad(x, earlier)
    checked_layer = _checked_layer(encoding, q, k, v, x, layer, positions, causal)
    return attention_of_layer(
        encoding, q, k, v, checked_layer.replace(window=window), last
    )


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
    """Return logits of one attention layer under `encoding`, before softmax, by the
    definition in fp32.

    Arguments and errors are those of `attention`. `last` is how many of the last query
    rows to return; None = all T. An encoding with `embed` needs x, since q and k carry
    its code only if they were computed from such an x.

    Returns:
        (B, H, last or T, T) fp32, or fp64 for fp64 inputs: scaled, biased, -inf where
        masked.
    """
    with torch.autocast(q.device.type, enabled=False):
        checked_layer = _checked_layer(encoding, q, k, k, x, layer, positions, causal)
        encoding, q, k, _, block = prepared_block(
            encoding, q, k, k, checked_layer, last
        )
        return block_logits(encoding, q, k, block)


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
    """Return output of one attention layer by the definition, (B, H, last or T, Dh)
    fp32; see `attention_logits`.
    """
    with torch.autocast(q.device.type, enabled=False):
        checked_layer = _checked_layer(encoding, q, k, v, x, layer, positions, causal)
        encoding, q, k, v, block = prepared_block(
            encoding, q, k, v, checked_layer, last
        )
        logits = block_logits(encoding, q, k, block)
        return encoding.map_outputs(encoding.attend(logits, v, block), block)


def prepared_block(
    encoding: Encoding,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: Layer,
    last: int | None = None,
) -> tuple[Encoding, Tensor, Tensor, Tensor, Layer]:
    """Return a layer's encoding and the inputs of its pairwise hooks, for one block of
    query rows with all keys, in fp32.
    """
    q, k, v = exact(q), exact(k), exact(v)
    encoding, q, k, v, layer = prepared(encoding, q, k, v, layer)
    length = q.shape[2]
    n_rows = last or length
    rows = slice(length - n_rows, length)
    layer = layer.replace(rows=rows, keys=slice(0, length), consecutive=False)
    visible = mask_of(layer, q.dtype) == 0
    return encoding, q[:, :, rows], k, v, layer.replace(visible=visible)


def _checked_layer(
    encoding: Encoding,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor | None,
    layer: int,
    positions: Tensor | None,
    causal: bool,
) -> Layer:
    """Return what the hooks of a layer read; UserError for inputs that do not fit or
    would bypass the encoding.
    """
    # in half precision its tables would be rounded
    for tensor in (*encoding.parameters(), *encoding.buffers()):
        if tensor.dtype in (torch.bfloat16, torch.float16):
            raise UserError(
                f"'{encoding.name}' was cast to {tensor.dtype}: cast the model before"
                " the encoding is built"
            )
    _refuse_shapes(encoding, q, k, v, x)
    name, n_layers = encoding.name, encoding.shape.n_layers
    if not 0 <= layer < n_layers:
        raise UserError(
            f"layer is {layer}: expected 0 to {n_layers - 1} for this '{name}'"
        )
    consecutive = positions is None
    batch, _, length, _ = q.shape
    if positions is None:
        positions = torch.arange(length, device=q.device)
    if positions.dim() == 1:
        positions = positions[None]
    if positions.shape not in ((1, length), (batch, length)):
        raise UserError(
            f"positions is {tuple(positions.shape)}: expected {(length,)} or"
            f" {(batch, length)}"
        )
    check_length(encoding, length)  # first, as it matters more than a missing input
    if x is None and "embed" in encoding.hooks:
        raise UserError(
            f"'{name}' acts on the model's input: pass x, made from"
            " encoding.embed(embeddings, positions, ids)"
        )
    if consecutive and "positions" in encoding.hooks:
        raise UserError(
            f"'{name}' chooses positions by itself: pass"
            " positions=encoding.positions(ids, None)"
        )
    return make_layer(encoding, positions, layer, x, consecutive, causal)


def _refuse_shapes(
    encoding: Encoding, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None
) -> None:
    """Raise UserError if shapes do not fit the encoding or each other."""
    shape = encoding.shape
    expected_heads = (shape.n_heads, shape.head_dim)
    if q.dim() != 4 or (q.shape[1], q.shape[3]) != expected_heads:
        raise UserError(
            f"q is {tuple(q.shape)}: expected (B, H, T, Dh), here (B, {shape.n_heads},"
            f" T, {shape.head_dim})"
        )
    batch, heads, length, width = q.shape
    for argument, tensor in (("k", k), ("v", v)):
        expected = batch, *tensor.shape[1:2], length, width
        if tensor.shape != expected or heads % tensor.shape[1]:
            raise UserError(
                f"{argument} is {tuple(tensor.shape)}: expected {tuple(q.shape)}, as q,"
                " or fewer heads"
            )
    if k.shape[1] != v.shape[1]:
        raise UserError(f"v has {v.shape[1]} heads: expected {k.shape[1]}, as k")
    if x is not None and x.shape != (batch, length, shape.d_model):
        raise UserError(
            f"x is {tuple(x.shape)}: expected (B, T, D), here"
            f" {(batch, length, shape.d_model)}"
        )


def _refuse_cache(encoding: Encoding, x: Tensor | None, n_queries: int) -> None:
    """Raise UserError if the last rows cannot be computed from a key-value cache."""
    if encoding.length_dependent or "q" in encoding.history:
        raise UserError(
            f"'{encoding.name}' needs more of earlier tokens than keys and values, so"
            " it has no key-value cache: pass q of all tokens"
        )
    if "x" in encoding.history and x is not None and x.shape[-2] == n_queries:
        raise UserError(
            f"'{encoding.name}' reads the input of earlier tokens: keep x beside keys"
            " and values, (B, T, D)"
        )
