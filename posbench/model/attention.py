"""Attention of one layer under an encoding: its definition, faster kernels with the
same result, and the choice of one.

`prepared`, `block_logits` and an encoding's `attend` are the definition. Each way of
`attention` is tested in values and gradients against what they give for all rows at
once.
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
from posbench.model.compiled import compiled

# most bytes of scores kept for a layer's backward pass; with more, rows are computed
# again
KEPT_BYTES = 128 * 2**20
# the same limit on an accelerator, as a share of its memory, if that is more
KEPT_SHARE_ACCELERATOR = 1 / 64
SCORE_BYTES = 8  # bytes of a pair's score in fp32, before and after softmax
# scores of a block that is computed again or without gradients: as many as a CPU's
# cache holds; on an accelerator at least as many as keep it busy
AT_ONCE = 2**21
AT_ONCE_ACCELERATOR = 2**26
# an accelerator's free bytes for each score of a block, with all that hooks and the
# backward pass compute from it: at most 216 were seen, of DAPE; 17 to 53 of others
ROOM_OF_SCORE = 512
MIN_ROWS = 64
MOST_COMPILED = 8  # blocks of a layer, each with graphs of its own
MASK_KEPT = 2**22  # pairs of the largest mask that is kept for other blocks
FUSED_FROM = 512  # tokens from which on the fused kernel is faster in bf16 training


def attention(
    encoding: Encoding,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: Layer,
    last: int | None = None,
    compiles: bool = False,
) -> Tensor:
    """Return the attention of one layer under `encoding`, (B, H, last or T, Dh) in v's
    dtype.

    Args:
        q, k, v: raw queries, keys, values (B, H, T, Dh); k and v may have fewer heads,
            each for a group of query heads.
        layer: what `make_layer` returns, with the model's own window and sinks.
        last: how many of the last query rows to compute; None = all T.
        compiles: compile blocks of rows on CUDA if they are few.
    """
    with torch.autocast(q.device.type, enabled=False):
        encoding, q, k, v, layer = prepared(encoding, q, k, v, layer)
        length = q.shape[2]
        layer = layer.replace(rows=slice(length - (last or length), length))

        output = None
        is_whole = layer.causal and layer.rows.start == 0
        if is_whole and not encoding.hooks & {"scores", "attend"}:
            # by a fused kernel, if one is faster than blocks of rows
            is_fast = layer.window is None and fused_is_fast(q, v)
            if is_fast and not encoding.hooks & PAIRWISE:
                output = F.scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=encoding.logit_scale
                )
            elif flex.serves(q, v):
                output = flex.attention(encoding, q, k, v, layer)
        if output is None:
            output = by_rows(encoding, q, k, v, layer, compiles)
        if "map_outputs" in encoding.hooks:
            output = encoding.map_outputs(exact(output), layer)
    return output.to(v.dtype)


def prepared(
    encoding: Encoding, q: Tensor, k: Tensor, v: Tensor, layer: Layer
) -> tuple[Encoding, Tensor, Tensor, Tensor, Layer]:
    """Run a layer's hooks on the whole sequence; return its encoding, the new q, k, v
    and the layer with its state and the window that holds.
    """
    encoding, layer = encoding.at(layer)
    dtype = v.dtype

    window = narrower(layer.window, encoding.window)
    if not layer.causal or (window is not None and window >= q.shape[2]):
        window = None
    layer = layer.replace(window=window)

    group = q.shape[1] // k.shape[1]
    if group > 1:  # query heads share a head of keys and values
        k = k.repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)
    if layer.x is not None:
        layer = layer.replace(x=exact(layer.x))
    if "map_values" in encoding.hooks:
        v = encoding.map_values(exact(v), layer).to(dtype)
    if encoding.hooks & {"prepare", "rotate"} and not layer.rotated:
        q, k = exact(q), exact(k)
        layer = layer.replace(state=encoding.prepare(q, k, layer))
        q, k = encoding.rotate(q, k, layer)
        q, k = q.to(dtype), k.to(dtype)
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


# -- in blocks of rows, for every encoding
# --------------------------------------------------------------------------------------


def by_rows(
    encoding: Encoding,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: Layer,
    compiles: bool = False,
) -> Tensor:
    """Return attention of what `prepared` returns at `layer.rows`, in blocks of query
    rows, each with just the keys that it may see. No row depends on another, so results
    depend on the blocks in rounding only.

    If all scores would be too many to keep, the backward pass computes those of each
    block again.
    """
    rows = layer.rows
    step, recompute = _blocks(q, layer)
    n_blocks = -(-(rows.stop - rows.start) // step)  # rounded up
    is_few = n_blocks <= MOST_COMPILED
    compiles = compiles and is_few and q.device.type == "cuda"
    block_of = _block_compiled if compiles else _block
    outputs: list[Tensor] = []
    for start in range(rows.start, rows.stop, step):
        queries = slice(start, min(rows.stop, start + step))
        # the keys that these rows may see
        stop = queries.stop if layer.causal else q.shape[2]
        first = 0
        if layer.window is not None:
            first = max(0, queries.start - layer.window + 1)
        keys: slice | Tensor = slice(first, stop)
        if layer.sinks and first > 0:
            sinks = torch.arange(layer.sinks, device=q.device)
            keys = torch.cat((sinks, torch.arange(first, stop, device=q.device)))
            # hooks that sum over keys also get those in between
            if first <= layer.sinks or encoding.hooks & {"scores", "attend"}:
                keys = slice(0, stop)
        parts = part_of(q, queries), part_of(k, keys), part_of(v, keys)
        part = layer.replace(rows=queries, keys=keys)
        block = encoding, *parts, part, mask_of(part, _exact_dtype(q))
        if recompute:
            # A compiled block saves all its tensors at its end.
            output = checkpoint(
                block_of, *block, use_reentrant=False, early_stop=not compiles
            )
        else:
            output = block_of(*block)
        outputs.append(output)
    if len(outputs) == 1:
        return outputs[0]
    return torch.cat(outputs, dim=2)


def _blocks(q: Tensor, layer: Layer) -> tuple[int, bool]:
    """Return how many rows a block has, and whether the backward pass computes the
    scores of each block again.
    """
    batch, heads, length, _ = q.shape
    n_rows = layer.rows.stop - layer.rows.start
    is_cpu = q.device.type == "cpu"

    kept_bytes = KEPT_BYTES
    if not is_cpu:
        share = machine.device_memory(q.device) * KEPT_SHARE_ACCELERATOR
        kept_bytes = max(KEPT_BYTES, int(share))
    trains = torch.is_grad_enabled()
    score_bytes = batch * heads * n_rows * length * SCORE_BYTES
    recompute = trains and score_bytes > kept_bytes

    step = n_rows
    if trains:
        # quarters compute fewer hidden pairs than one block would
        quarter = -(-n_rows // 4)  # rounded up
        step = max(2 * MIN_ROWS, quarter)
    if recompute or not trains:
        # only one block's scores exist at a time
        row_scores = batch * heads * length
        if is_cpu:
            fitting = AT_ONCE // row_scores
        else:
            fitting = at_once(free_memory(q.device)) // row_scores
            fitting -= fitting % MIN_ROWS  # matrices of whole tiles
        step = min(step, max(MIN_ROWS, fitting))
    if layer.window is not None:
        # a block reads the keys of its window, and those between its rows
        step = min(step, max(MIN_ROWS, layer.window))
    return step, recompute


def at_once(free: int) -> int:
    """Return how many scores a block may have on an accelerator with so many free
    bytes. Deterministic training has the same blocks whatever else uses the memory.
    """
    if torch.are_deterministic_algorithms_enabled():
        return AT_ONCE_ACCELERATOR
    return max(AT_ONCE_ACCELERATOR, free // ROOM_OF_SCORE)


# Asked once: a layer that is computed again must have the blocks of its forward pass.
free_memory = functools.cache(machine.free_memory)


def block_logits(
    encoding: Encoding,
    q: Tensor,
    k: Tensor,
    layer: Layer,
) -> Tensor:
    """Return a block's logits (B, H, Tq, Tk): scaled, biased, -inf where hidden; all
    but the product q·k is in fp32.
    """
    mask = mask_of(layer, _exact_dtype(q))
    return _logits(encoding, q, k, layer, mask, _biases(encoding, q, k, layer))


def _logits(
    encoding: Encoding,
    q: Tensor,
    k: Tensor,
    layer: Layer,
    mask: Tensor,
    biases: Tensor | None,
) -> Tensor:
    scores = q @ k.mT
    scale = encoding.logit_scale
    if "scores" in encoding.hooks:
        logits = exact(scores) * scale
        if biases is not None:
            logits = logits + biases
        logits = encoding.scores(logits, exact(q), exact(k), layer) + mask
    elif biases is None:
        logits = torch.add(mask, scores, alpha=scale)
    elif biases.dim() == 4 and len(biases) > 1:
        # Each sequence has biases of its own: their sum with the mask would be one more
        # tensor of (B, H, Tq, Tk).
        logits = torch.add(mask, scores, alpha=scale) + biases
    else:
        logits = torch.add(biases + mask, scores, alpha=scale)
    # a hidden key far away may have the logit +inf, and +inf - inf is NaN
    if not layer.consecutive:
        logits = torch.where(mask == 0, logits, -math.inf)
    return logits


def _block(
    encoding: Encoding, q: Tensor, k: Tensor, v: Tensor, layer: Layer, mask: Tensor
) -> Tensor:
    """Return the outputs (B, H, Tq, Dh) of a block of query rows; `mask` as `mask_of`
    returns it.
    """
    biases = _biases(encoding, q, k, layer)
    needs_logits = bool(encoding.hooks & {"scores", "attend"})
    # Fused kernels take biases as a mask. They give no gradient of it, and cannot hide
    # infinite logits (later keys where positions jump).
    is_mask = biases is None or not biases.requires_grad
    takes_mask = is_mask and layer.consecutive and fused_is_fast(q, v)
    if takes_mask and not needs_logits:
        if biases is not None:
            mask = biases + mask
        mask = mask.to(q.dtype).expand(*q.shape[:3], k.shape[2])
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=encoding.logit_scale
        )
    if needs_logits:
        layer = layer.replace(visible=mask == 0)
    logits = _logits(encoding, q, k, layer, mask, biases)
    return encoding.attend(logits, v, layer)


# A graph for each block of a layer. A graph of all shapes might serve a block when it
# is computed again, and save other tensors than the first one.
_block_compiled = compiled(_block, dynamic=False)


def _biases(encoding: Encoding, q: Tensor, k: Tensor, layer: Layer) -> Tensor | None:
    """Return what is added to the logits of a block, broadcastable to (B, H, Tq, Tk);
    None = nothing.
    """
    total = None
    if "distance_bias" in encoding.hooks:
        rows, keys = layer.rows, layer.keys
        if layer.consecutive and layer.causal and isinstance(keys, slice):
            # each distance once
            n_distances = rows.stop - keys.start
            distances = torch.arange(n_distances, device=layer.positions.device)
            by_distance = encoding.distance_bias(distances, layer)
            if by_distance is not None:
                total = _by_pairs(by_distance, rows.stop - rows.start)
        else:
            by_pair = encoding.distance_bias(layer.distance, layer)
            if by_pair is not None:
                total = by_pair.movedim(0, 1)
    if "bias" in encoding.hooks:
        bias = encoding.bias(exact(q), exact(k), layer)
        if total is None:
            return bias
        if bias is not None:
            total = total + bias
    return total


def _by_pairs(by_distance: Tensor, rows: int) -> Tensor:
    """Return (H, rows, K), values (H, K) at distances 0 .. K-1, for the last queries of
    K keys; later keys have 0.

    Row r is a common row from its place rows - 1 - r on: copies of that row, read one
    number shorter, are shifted so.
    """
    # For 2 rows and 3 keys, with . for a later key, the common row is 2 1 0 . . and two
    # copies, read in rows of 4, are 2 1 0 . and . 2 1 0. Without the first rows - 1
    # columns this is 1 0 . and 2 1 0.
    heads, keys = by_distance.shape
    width = keys + rows - 1  # one number shorter than a common row
    common = F.pad(by_distance.flip(-1), (0, rows))
    copies = common[:, None].expand(-1, rows, -1).flatten(1)
    shifted = copies[:, : rows * width].view(heads, rows, width)
    return shifted[..., rows - 1 :]


def mask_of(layer: Layer, dtype: torch.dtype) -> Tensor:
    """Return the mask (Tq, Tk) of a block: 0 where a key is visible, -inf where it is
    hidden.
    """
    rows, keys, sinks = layer.rows, layer.keys, layer.sinks
    settings = layer.window, sinks, layer.causal, dtype, layer.positions.device
    if isinstance(keys, Tensor):
        return _mask(rows.start, rows.stop, keys, *settings)
    shift = 0 if sinks else keys.start  # blocks of equal shape share one mask
    pairs = (rows.stop - rows.start) * (keys.stop - keys.start)
    is_kept = pairs <= MASK_KEPT and not torch.compiler.is_compiling()
    make_mask = _kept_mask if is_kept else _mask
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
    if isinstance(keys, range):
        keys = torch.arange(keys.start, keys.stop, device=device)
    gap = torch.arange(start, stop, device=device)[:, None] - keys
    mask = torch.zeros(gap.shape, dtype=dtype, device=device)
    if causal:
        mask.masked_fill_(gap < 0, -math.inf)
    if window is not None:
        mask.masked_fill_((gap >= window) & (keys >= sinks), -math.inf)
    return mask


def _exact_dtype(q: Tensor) -> torch.dtype:
    """Return the dtype of a block's logits and mask."""
    return torch.promote_types(q.dtype, torch.float32)


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
    trains = torch.is_grad_enabled()
    if q.device.type == "cuda":
        return not (trains and torch.are_deterministic_algorithms_enabled())
    if q.device.type != "cpu" or q.dtype != torch.bfloat16:
        return True
    if trains and q.shape[2] < FUSED_FROM:
        return False
    return machine.has_amx()
