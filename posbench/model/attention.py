"""Attention of one layer under an encoding: its definition, faster kernels with the
same result, and the choice of one.

`by_rows` is the definition. Every other path is tested against it in values and
gradients.
"""

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from posbench import machine
from posbench.encodings.base import (
    PAIRWISE,
    Encoding,
    Layer,
    check_length,
    exact,
    narrower,
    part_of,
)
from posbench.model import flex

# most bytes of scores kept for a layer's backward pass; with more, rows are computed
# again
KEPT_BYTES = 128 * 2**20
# the same limit on an accelerator, as a share of its memory, if that is more
KEPT_SHARE_ACCELERATOR = 1 / 64
SCORE_BYTES = 8  # bytes of a pair's score in fp32, before and after softmax
# scores of a block that is computed again or without gradients: as many as a CPU's
# cache holds
AT_ONCE = 2**21
AT_ONCE_ACCELERATOR = 2**24
MIN_ROWS = 64
# tokens from which on the kernel is faster with a bias as key channels, and in bf16
# training
FUSED_FROM = 512
ALIGNED = 8  # channels of a head that fused kernels take at once


def attention(
    encoding: Encoding,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: Layer,
    window: int | None = None,
    sinks: int = 0,
    last: int | None = None,
) -> Tensor:
    """Return the attention of one layer under `encoding`, (B, H, last or T, Dh) in v's
    dtype.

    Args:
        q, k, v: raw queries, keys, values (B, H, T, Dh); k and v may have fewer heads,
            each for a group of query heads.
        layer: what `make_layer` returns.
        window: keys a query may see, itself included (causal only); None = all before
            it.
        sinks: keys at the beginning that every query sees beside its window.
        last: how many of the last query rows to compute; None = all T.
    """
    with torch.autocast(q.device.type, enabled=False):
        length, dtype = q.shape[2], v.dtype
        encoding, q, k, v, layer = prepared(encoding, q, k, v, layer)
        rows = slice(length - (last or length), length)
        window = narrower(window, encoding.window) if layer.causal else None
        window = None if window is not None and window >= length else window
        layer = layer.replace(window=window, sinks=sinks)
        is_full = layer.causal and rows.start == 0
        output = None
        if (
            is_full
            and not encoding.hooks & PAIRWISE
            and window is None
            and fused_is_fast(q, v)
        ):
            output = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=encoding.logit_scale
            )
        elif is_full and flex.serves(q, v):
            output = flex.attention(encoding, q, k, v, layer)
        elif (
            is_full and window is None and length >= FUSED_FROM and fused_is_fast(q, v)
        ):
            output = _by_channels(encoding, q, k, v, layer)
        if output is None:
            output = by_rows(encoding, q, k, v, layer, rows)
        if "map_outputs" in encoding.hooks:
            output = encoding.map_outputs(exact(output), layer.replace(rows=rows))
    return output.to(dtype)


def prepared(
    encoding: Encoding, q: Tensor, k: Tensor, v: Tensor, layer: Layer
) -> tuple[Encoding, Tensor, Tensor, Tensor, Layer]:
    """Run a layer's hooks on the whole sequence; return its encoding, the new q, k, v
    and the layer with its state.
    """
    encoding, layer = encoding.at(layer)
    dtype, group = v.dtype, q.shape[1] // k.shape[1]
    if group > 1:  # query heads share a head of keys and values
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    if layer.x is not None:
        layer = layer.replace(x=exact(layer.x))
    if "map_values" in encoding.hooks:
        v = encoding.map_values(exact(v), layer).to(dtype)
    if encoding.hooks & {"prepare", "rotate"}:
        q, k = exact(q), exact(k)
        layer = layer.replace(state=encoding.prepare(q, k, layer))
        q, k = (tensor.to(dtype) for tensor in encoding.rotate(q, k, layer))
    return encoding, q, k, v, layer


def make_layer(
    encoding: Encoding,
    positions: Tensor,
    index: int = 0,
    x: Tensor | None = None,
    consecutive: bool = False,
    causal: bool = True,
) -> Layer:
    """Return what the hooks of a layer read, with the tables of all layers; for another
    layer, replace `index` and `x`.

    Raise Undefined if the input is longer than the encoding is defined for.
    """
    check_length(encoding, positions.shape[-1])
    with torch.autocast(positions.device.type, enabled=False):
        tables = encoding.make_tables(positions)
    return Layer(index, positions, x, tables, consecutive=consecutive, causal=causal)


# -- the definition
# --------------------------------------------------------------------------------------


def by_rows(
    encoding: Encoding,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: Layer,
    rows: slice,
) -> Tensor:
    """Return attention of what `prepared` returns, in blocks of query rows, each with
    just the keys that it may see.

    If all scores would be too many to keep, the backward pass computes those of each
    block again.
    """
    batch, heads, length, _ = q.shape
    window, sinks = layer.window, layer.sinks
    n_rows = rows.stop - rows.start
    recompute = (
        torch.is_grad_enabled()
        and batch * heads * n_rows * length * SCORE_BYTES > _kept_bytes(q.device)
    )
    # quarters compute fewer hidden pairs than one block would
    step = max(2 * MIN_ROWS, -(-n_rows // 4))
    if recompute or not torch.is_grad_enabled():
        budget = AT_ONCE if q.device.type == "cpu" else AT_ONCE_ACCELERATOR
        step = max(MIN_ROWS, budget // (batch * heads * length))
    if window is not None:
        step = min(step, max(MIN_ROWS, window))
    sums_keys = bool(encoding.hooks & {"scores", "attend"})
    outputs = []
    for start in range(rows.start, rows.stop, step):
        stop = min(rows.stop, start + step)
        first = max(0, start - window + 1) if window is not None else 0
        keys: slice | Tensor = slice(
            0 if sinks else first, stop if layer.causal else length
        )
        # hooks that sum over keys also get those in between
        if sinks and first > sinks and not sums_keys:
            keys = torch.cat((torch.arange(sinks), torch.arange(first, stop)))
        queries = slice(start, stop)
        parts = part_of(q, queries), part_of(k, keys), part_of(v, keys)
        block = encoding, *parts, layer.replace(rows=queries, keys=keys)
        outputs.append(
            checkpoint(_block, *block, use_reentrant=False)
            if recompute
            else _block(*block)
        )
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def logits_by_rows(
    encoding: Encoding,
    q: Tensor,
    k: Tensor,
    layer: Layer,
) -> Tensor:
    """Return a block's logits (B, H, Tq, Tk): scaled, biased, -inf where hidden; all
    but the product q·k is in fp32.
    """
    return _logits(encoding, q, k, layer, _biases(encoding, q, k, layer))


def _logits(
    encoding: Encoding,
    q: Tensor,
    k: Tensor,
    layer: Layer,
    biases: Tensor | None,
) -> Tensor:
    mask = mask_of(layer, exact(q).dtype)
    scores = q @ k.mT
    if "scores" in encoding.hooks:
        layer = layer.replace(visible=mask == 0)
        logits = exact(scores) * encoding.logit_scale
        logits = logits if biases is None else logits + biases
        logits = encoding.scores(logits, exact(q), exact(k), layer) + mask
    elif biases is not None and biases.dim() == 4 and len(biases) > 1:
        # Each sequence has biases of its own: their sum with the mask would be one more
        # tensor of (B, H, Tq, Tk).
        logits = torch.add(mask, scores, alpha=encoding.logit_scale) + biases
    else:
        logits = torch.add(
            mask if biases is None else biases + mask,
            scores,
            alpha=encoding.logit_scale,
        )
    # a hidden key far away may have the logit +inf, and +inf - inf is NaN
    if not layer.consecutive:
        logits = torch.where(mask == 0, logits, -math.inf)
    return logits


def _block(
    encoding: Encoding,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: Layer,
) -> Tensor:
    """Return the outputs (B, H, Tq, Dh) of a block of query rows."""
    biases = _biases(encoding, q, k, layer)
    # Fused kernels give no gradient of the mask and cannot hide infinite logits (later
    # keys where positions jump).
    fused = (
        layer.consecutive
        and not encoding.hooks & {"scores", "attend"}
        and fused_is_fast(q, v)
    )
    if fused and (biases is None or not biases.requires_grad):
        mask = mask_of(layer, exact(q).dtype)
        mask = (
            (mask if biases is None else biases + mask)
            .to(q.dtype)
            .expand(*q.shape[:3], k.shape[2])
        )
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=encoding.logit_scale
        )
    logits = _logits(encoding, q, k, layer, biases)
    if "attend" in encoding.hooks:
        layer = layer.replace(visible=mask_of(layer, logits.dtype) == 0)
    return encoding.attend(logits, v, layer)


def _biases(encoding: Encoding, q: Tensor, k: Tensor, layer: Layer) -> Tensor | None:
    """Return what is added to the logits of a block, broadcastable to (B, H, Tq, Tk);
    None = nothing.
    """
    total, rows = None, layer.rows
    if "distance_bias" in encoding.hooks:
        is_consecutive = layer.consecutive and layer.causal
        first = (
            layer.keys.start
            if is_consecutive and isinstance(layer.keys, slice)
            else None
        )
        distance = (
            layer.distance
            if first is None
            else torch.arange(rows.stop - first, device=q.device)
        )
        total = encoding.distance_bias(distance, layer)
        if total is not None:
            total = (
                total.movedim(0, 1)
                if first is None
                else _by_pairs(total, rows.stop - rows.start)
            )
    if "bias" in encoding.hooks:
        bias = encoding.bias(exact(q), exact(k), layer)
        total = bias if total is None else total if bias is None else total + bias
    return total


def _by_pairs(by_distance: Tensor, rows: int) -> Tensor:
    """Return (H, rows, K), values (H, K) at distances 0 .. K-1, for the last queries of
    K keys; later keys have 0.

    Row r is a common row from its place rows - 1 - r on: copies of that row, read one
    number shorter, are shifted so.
    """
    heads, keys = by_distance.shape
    common = F.pad(by_distance.flip(-1), (0, rows))
    copies = (
        common[:, None].expand(-1, rows, -1).flatten(1)[:, : rows * (keys + rows - 1)]
    )
    return copies.view(heads, rows, keys + rows - 1)[..., rows - 1 :]


def mask_of(layer: Layer, dtype: torch.dtype) -> Tensor:
    """Return the mask (Tq, Tk) of a block: 0 where a key is visible, -inf where it is
    hidden.
    """
    rows, keys, sinks = layer.rows, layer.keys, layer.sinks
    settings = layer.window, sinks, layer.causal, dtype, layer.positions.device
    if isinstance(keys, Tensor):
        return _mask(rows.start, rows.stop, keys, *settings)
    shift = 0 if sinks else keys.start  # blocks of equal shape share one mask
    make_mask = _mask if torch.compiler.is_compiling() else _kept_mask
    return make_mask(
        rows.start - shift,
        rows.stop - shift,
        range(keys.start - shift, keys.stop - shift),
        *settings,
    )


def _mask(
    start: int,
    stop: int,
    keys: range | Tensor,
    window: int | None,
    sinks: int,
    causal: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    keys = torch.arange(keys.start, keys.stop) if isinstance(keys, range) else keys
    gap = torch.arange(start, stop)[:, None] - keys
    visible = gap >= 0 if causal else torch.ones_like(gap, dtype=torch.bool)
    if window is not None:
        visible = visible & ((gap < window) | (keys < sinks))
    return (
        torch.zeros(gap.shape, dtype=dtype).masked_fill(~visible, -math.inf).to(device)
    )


# Masks must not be inference tensors: training may use one that an evaluation has made.
_kept_mask = functools.lru_cache(64)(torch.inference_mode(False)(_mask))


# -- the choice of a kernel
# --------------------------------------------------------------------------------------


def fused_is_fast(q: Tensor, v: Tensor) -> bool:
    """Return whether torch's fused kernel suits q and v, (B, H, T, their widths),
    better than matrix products do.

    It takes q and v of one width. In bf16 on CPUs without AMX it has a third of the
    speed of matrix products. With AMX it has half of their speed in training below
    `FUSED_FROM`, where its backward pass is slow. On CUDA it sums gradients in no fixed
    order, so deterministic training cannot use it.
    """
    if q.shape[-1] != v.shape[-1]:
        return False
    if q.device.type == "cuda":
        return not (
            torch.is_grad_enabled() and torch.are_deterministic_algorithms_enabled()
        )
    trains_short = torch.is_grad_enabled() and q.shape[2] < FUSED_FROM
    return (
        q.device.type != "cpu"
        or q.dtype != torch.bfloat16
        or (not trains_short and machine.has_amx())
    )


def _by_channels(
    encoding: Encoding, q: Tensor, k: Tensor, v: Tensor, layer: Layer
) -> Tensor | None:
    """Return attention by the fused kernel, with the bias of each key in extra
    channels; None if it has no such form.

    One bf16 channel is too coarse from some hundred tokens on. Three that add up hold
    all of fp32's digits but one.
    """
    per_key = (
        encoding.key_bias(layer) if not encoding.hooks & {"scores", "attend"} else None
    )
    exact_products = q.dtype in (torch.float32, torch.float64)
    # gradients cancel, too much for bf16
    if per_key is None or (per_key.requires_grad and not exact_products):
        return None
    remainder, channels = per_key / encoding.logit_scale, []
    for _ in range(1 if exact_products else 3):
        channels.append(remainder.to(q.dtype))
        remainder = remainder - channels[-1].to(remainder.dtype)
    bias_channels = torch.stack(channels, dim=-1).expand(*k.shape[:3], -1)
    width, n_channels = v.shape[-1], len(channels)
    padding = -(k.shape[-1] + n_channels) % ALIGNED
    q = F.pad(F.pad(q, (0, n_channels), value=1.0), (0, padding))
    k = F.pad(torch.cat((k, bias_channels), dim=-1), (0, padding))
    v = F.pad(v, (0, n_channels + padding))
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=encoding.logit_scale
    )[..., :width]


def _kept_bytes(device: torch.device) -> int:
    """Return the bytes that one layer may keep for its backward pass."""
    share = (
        0
        if device.type == "cpu"
        else machine.device_memory(device) * KEPT_SHARE_ACCELERATOR
    )
    return max(KEPT_BYTES, int(share))
