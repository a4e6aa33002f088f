"""Outputs of causal attention with a bias by distance, by torch's fused kernel, where no gradient is wanted.

With the keys in reverse order, the distance from query to key grows by one with every row and by one with every column.
So the bias of a block of rows, a Toeplitz matrix, is a view of one line of numbers per head, which each row reads from
one place further on; it never exists at (H, Tq, Tk). The line is -inf at its ends, where the hidden keys are.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# Query rows in a block, a share of the keys: more waste work above the diagonal, fewer make more calls.
MIN_ROWS, MAX_ROWS, SHARE = 256, 1024, 16


def toeplitz_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, values: Tensor, window: int | None) -> Tensor:
    """Causal attention softmax(scale q·k + bias) v; arguments and result as of `tiled_attention`. It has no gradient.

    Args:
        values: the bias at the distances 0 .. Tk-1, (H, Tk) fp32.
    """
    length, keys = q.shape[2], k.shape[2]
    before, seen = keys - length, min(keys, window or keys)
    rows = min(length, max(MIN_ROWS, min(MAX_ROWS, seen // SHARE)))
    line = F.pad(values[:, :seen], (rows - 1, rows), value=-math.inf)  # at the distances from 1 - rows on
    k, v = k.flip(2), v.flip(2)
    out = torch.empty_like(q)
    for start in range(0, length, rows):
        stop = min(length, start + rows)
        first = max(0, before + start + 1 - seen)  # the first key that the block sees
        shown = slice(length - stop, keys - first)
        nearest = line[:, rows - (stop - start) :]
        size = (*q.shape[:2], stop - start, shown.stop - shown.start)
        bias = nearest.as_strided(size, (0, line.stride(0), 1, 1), nearest.storage_offset())
        with torch.autocast(q.device.type, enabled=False):  # which would round the bias
            out[:, :, start:stop] = F.scaled_dot_product_attention(
                q[:, :, start:stop], k[:, :, shown], v[:, :, shown], attn_mask=bias, scale=scale
            )
    return out
