"""The one place that chooses how an attention layer is computed."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from posbench.encodings.base import PAIRWISE, Encoding, Rows, check_length, declared, rotated_by
from posbench.kernels import flex
from posbench.kernels.bias import Bias, LaidOut
from posbench.kernels.tiled import fused_is_fast, tiled_attention
from posbench.kernels.tiles import exact, kept_bytes
from posbench.model.attention.reference import biases_of, grouped, logits_of, narrower, rows_of

# Scores (B x H x rows x keys) of the row form. At once: on CPUs, what caches hold. Kept for one backward pass, in fp32
# and twice over: above the bytes that a layer may keep, blocks of rows are computed again.
SCORES_AT_ONCE = 2**21
SCORES_AT_ONCE_ACCELERATOR = 2**24
SCORE_BYTES = 8
MIN_ROWS = 64
# Tokens from which on torch's fused kernel, where there is AMX, is faster than tiles with gradients, too.
FUSED_GRADIENTS_FROM = 1024


def attention(
    encoding: Encoding,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor | None,
    positions: Tensor,
    layer: int,
    window: int | None = None,
    sinks: int = 0,
    consecutive: bool = False,
    last: int | None = None,
    causal: bool = True,
) -> Tensor:
    """Attention of one layer under `encoding`, equal to `reference.attention_output`.

    Args:
        q, k, v: raw queries, keys, values (B, H, T, Dh); keys and values may have fewer heads, each for a group.
        x: the layer's normalised input (B, T, D); None for encodings that do not look at it.
        positions: (1|B, T).
        window: keys a query may see, itself included (causal only); None = all before it.
        sinks: keys at the beginning that every query sees beside its window.
        consecutive: positions are known to be 0 .. T-1, so that cheaper forms which count tokens hold.
        last: compute only the last so many query rows; None = all T.
        causal: hide keys after the query.

    Returns:
        (B, H, last or T, Dh) in v's dtype.
    """
    check_length(encoding, q.shape[2])
    encoding, layer = encoding.at(layer)
    window, dtype = narrower(window, encoding.window), v.dtype
    whole = causal and not last and (not sinks or flex.serves(q.device))  # one kernel knows sinks; none knows `last`
    # The compiler cannot see into hand-written kernels.
    by_data = whole and consecutive and not torch.compiler.is_compiling()
    added = declared(encoding, q, grouped(k, q), x, positions, layer) if by_data else None
    # Tiles add -inf to logits that are hidden, at consecutive positions those of a few hundred keys after the query.
    addable = consecutive or encoding.hidden_finite
    known = added is not None or (whole and addable and not encoding.hooks & PAIRWISE)
    out = None
    if known:
        values = encoding.map_values(grouped(v, q), x, positions, layer).to(dtype)
        rotated, keys = rotated_by(encoding, q, grouped(k, q), x, positions, layer)
        rotated, keys = rotated.to(dtype), keys.to(dtype)
        if flex.takes(rotated, values, added, window, sinks):
            out = flex.flex_attention(rotated, keys, values, encoding.logit_scale, added, window, sinks)
        elif not sinks:
            out = kernel(rotated, keys, values, encoding.logit_scale, added, window)
    if out is None:
        out = _by_rows(encoding, q, k, v, x, positions, layer, window, sinks, last, causal)
    if "map_outputs" in encoding.hooks:
        rows = slice(-out.shape[2], None)
        out = encoding.map_outputs(out, None if x is None else x[:, rows], positions[:, rows], layer)
    return out.to(dtype)


def kernel(q: Tensor, k: Tensor, v: Tensor, scale: float, added: Bias | None, window: int | None) -> Tensor:
    """Attention with what an encoding adds, by the fastest kernel for it on this device.

    Measured on CPUs: tiles win in bf16 and, with a bias, gradients or queries wider than the values, in fp32; fused
    attention wins otherwise (and is what the compiler can see into). With AMX that wins in bf16, too, but for the
    gradients of short sequences.
    """
    on_cpu = q.device.type == "cpu" and not torch.compiler.is_compiling()
    of_one_width = q.shape[-1] == v.shape[-1]  # else torch has no fused kernel there, and stores every score
    slow = on_cpu and not (of_one_width and window is None and _fused_wins(q))
    if added is not None or slow or _sums_in_any_order(q):
        return tiled_attention(q, k, v, scale, added, window)
    if window is None or window >= q.shape[2]:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    index = torch.arange(q.shape[2], device=q.device)
    gap = index[:, None] - index
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(gap >= 0) & (gap < window), scale=scale)


def _sums_in_any_order(q: Tensor) -> bool:
    """Whether the same bits twice are wanted of torch's fused gradients on CUDA, which then only warn."""
    return q.device.type == "cuda" and torch.is_grad_enabled() and torch.are_deterministic_algorithms_enabled()


def _fused_wins(q: Tensor) -> bool:
    """Whether torch's fused kernel is faster than tiles on a CPU, where nothing is added to the logits."""
    if torch.is_grad_enabled():
        return fused_is_fast(q) and q.shape[2] >= FUSED_GRADIENTS_FROM
    return fused_is_fast(q) or q.dtype == torch.float32


def _by_rows(
    encoding: Encoding,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor | None,
    positions: Tensor,
    layer: int,
    window: int | None,
    sinks: int = 0,
    last: int | None = None,
    causal: bool = True,
) -> Tensor:
    batch, heads, length, _ = q.shape
    wanted = last or length
    at_once = SCORES_AT_ONCE if q.device.type == "cpu" else SCORES_AT_ONCE_ACCELERATOR
    kept = batch * heads * wanted * length * SCORE_BYTES <= kept_bytes(q.device)
    block = wanted if kept else min(wanted, max(MIN_ROWS, at_once // (batch * heads * length)))
    seen = length
    if window:  # a block sees the keys before its first row as far as the window goes, and sinks
        block = min(block, max(MIN_ROWS, window))
        seen = min(length, block + window + sinks)
    sequences = max(1, at_once // (heads * block * seen))
    out = []
    for first in range(0, batch, sequences):
        some = slice(first, first + sequences)
        where = positions if len(positions) == 1 else positions[some]
        read = None if x is None else x[some]
        blocks = rows_of(
            encoding, q[some], k[some], v[some], read, where, layer, causal, window, sinks, block=block, last=last
        )
        out.append(torch.cat([_row_block(encoding, rows, kept, window, sinks, causal) for rows in blocks], dim=2))
    return torch.cat(out)


def _row_block(encoding: Encoding, rows: Rows, kept: bool, window: int | None, sinks: int, causal: bool) -> Tensor:
    only_added = "attend" not in encoding.hooks and ("scores" not in encoding.hooks or encoding.additive_scores)
    tiled = causal and only_added and encoding.hidden_finite and not sinks and not torch.compiler.is_compiling()

    def attend(rows: Rows) -> Tensor:
        if tiled:
            q, k, dtype = rows.q, rows.k, rows.v.dtype
            added = _added(encoding, rows) or Bias()  # never None: rows may be the last ones only, which tiles know
            return kernel(q.to(dtype), k.to(dtype), rows.v, encoding.logit_scale, added, window)
        return encoding.attend(logits_of(encoding, rows), rows)

    if kept or not torch.is_grad_enabled():
        return attend(rows)
    return checkpoint(attend, rows, use_reentrant=False)  # type: ignore[no-any-return]


def _added(encoding: Encoding, rows: Rows) -> Bias | None:
    """The sum of what the pairwise hooks add to a block's logits, (1|B, H, Tq, Tk); None = nothing."""
    found = biases_of(encoding, rows)
    if "scores" in encoding.hooks:
        found = [encoding.scores(sum(found, rows.q.new_zeros((), dtype=exact(rows.q))), rows)]
    if not found:
        return None
    total = sum(found[1:], found[0]).expand(-1, rows.q.shape[1], *rows.visible.shape)
    return LaidOut(total[0] if len(total) == 1 else total)
