"""The one place that chooses how an attention layer is computed."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from posbench.attention.reference import logits_of, rows_of
from posbench.encodings.base import Encoding, Rows, check_length
from posbench.kernels.bias import Table
from posbench.kernels.tiled import tiled_attention

PAIRWISE = frozenset({"distance_bias", "bias", "scores", "attend"})

# Scores (B x H x rows x keys) of the row form. At once: on CPUs, what caches hold. Kept for one backward pass (in fp32,
# several times over): above that, blocks of rows are computed again.
SCORES_AT_ONCE = 2**21
SCORES_AT_ONCE_ACCELERATOR = 2**24
SCORES_KEPT = 2**24
MIN_ROWS = 64


def attention(
    encoding: Encoding,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor,
    positions: Tensor,
    layer: int,
    window: int | None = None,
    sinks: int = 0,
    consecutive: bool = False,
    last: int | None = None,
) -> Tensor:
    """Causal attention of one layer under `encoding`, equal to `reference.attention_output`.

    Args:
        q, k, v: raw queries, keys, values (B, H, T, Dh).
        x: the layer's normalised input (B, T, D).
        positions: (1|B, T).
        window: keys a query may see, itself included; None = all before it.
        sinks: keys at the beginning that every query sees beside its window.
        consecutive: positions are known to be 0 .. T-1, so that cheaper forms which count tokens hold.
        last: compute only the last so many query rows; None = all T.

    Returns:
        (B, H, last or T, Dh) in v's dtype.
    """
    check_length(encoding, q.shape[2])
    pairwise = encoding.hooks & PAIRWISE
    consecutive = consecutive and not torch.compiler.is_compiling()  # the compiler cannot see into hand-written kernels
    whole = not sinks and not last  # the cheaper forms know neither
    if whole and consecutive and "attention" in encoding.hooks:
        out = encoding.attention(q, k, v, x, positions, layer, window)
    elif whole and (not pairwise or (consecutive and pairwise == {"distance_bias"})):
        table = distance_table(encoding, q.shape[2], layer, q.device)
        q, k = encoding.rotate(q, k, x, positions, layer)
        out = plain(q.to(v.dtype), k.to(v.dtype), v, encoding.logit_scale, table, window)
    else:
        out = _by_rows(encoding, q, k, v, x, positions, layer, window, sinks, last)
    return out.to(v.dtype)


def distance_table(encoding: Encoding, length: int, layer: int, device: torch.device) -> Tensor | None:
    """The scheme's bias (H, T) at the distances 0 .. T-1, which is all there are between consecutive positions."""
    with torch.autocast(device.type, enabled=False):
        values = encoding.distance_bias(torch.arange(length, device=device), layer)
    return None if values is None else values.float().expand(encoding.shape.n_heads, length)


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float, table: Tensor | None, window: int | None) -> Tensor:
    """Attention with at most a bias by distance, by the fastest kernel for the device.

    Measured on CPUs: blocked wins in bf16 and, with a bias or gradients, in fp32; fused wins for the rest
    (and is what the compiler can see into).
    """
    on_cpu = q.device.type == "cpu" and not torch.compiler.is_compiling()
    fp32_evaluation = q.dtype == torch.float32 and not torch.is_grad_enabled() and window is None
    if table is not None or (on_cpu and not fp32_evaluation):
        return tiled_attention(q, k, v, scale, None if table is None else Table(table), window)
    if window is None or window >= q.shape[2]:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    return windowed(q, k, v, scale, window)


def _by_rows(
    encoding: Encoding,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor,
    positions: Tensor,
    layer: int,
    window: int | None,
    sinks: int = 0,
    last: int | None = None,
) -> Tensor:
    batch, heads, length, _ = q.shape
    wanted = last or length
    at_once = SCORES_AT_ONCE if q.device.type == "cpu" else SCORES_AT_ONCE_ACCELERATOR
    kept = batch * heads * wanted * length <= SCORES_KEPT
    block = wanted if kept else min(wanted, max(MIN_ROWS, at_once // (batch * heads * length)))
    sequences = max(1, at_once // (heads * block * length))
    out = []
    for first in range(0, batch, sequences):
        some = slice(first, first + sequences)
        where = positions if len(positions) == 1 else positions[some]
        blocks = rows_of(
            encoding, q[some], k[some], v[some], x[some], where, layer, True, window, sinks, block=block, last=last
        )
        out.append(torch.cat([_row_block(encoding, rows, kept) for rows in blocks], dim=2))
    return torch.cat(out)


def _row_block(encoding: Encoding, rows: Rows, kept: bool) -> Tensor:
    def compute(rows: Rows) -> Tensor:
        return encoding.attend(logits_of(encoding, rows), rows)

    if kept or not torch.is_grad_enabled():
        return compute(rows)
    return checkpoint(compute, rows, use_reentrant=False)  # type: ignore[no-any-return]


def windowed(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
    """Sliding-window attention by blocks of `window` query rows, O(window x length) in time and memory."""
    index = torch.arange(2 * window, device=q.device)
    gap = index[window:, None] - index[None, :]  # (window, 2 window): a block's rows against its own and the last keys
    visible = (gap >= 0) & (gap < window)
    out = []
    for start in range(0, q.shape[2], window):
        stop = min(q.shape[2], start + window)
        first = max(0, start - window)
        mask = visible[: stop - start, window - (start - first) : window + stop - start]
        out.append(
            F.scaled_dot_product_attention(
                q[:, :, start:stop], k[:, :, first:stop], v[:, :, first:stop], attn_mask=mask, scale=scale
            )
        )
    return torch.cat(out, dim=2)
