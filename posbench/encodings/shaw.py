"""Relative position representations (Shaw et al.): a learned vector per clipped distance, for keys and for values.

    logits_ij = q_i·(k_j + a_r) / sqrt(d),   output_i = sum over j of α_ij (v_j + b_r),   r = clip(j - i, -K, K)

a and b are shared by the heads and separate per layer. With a causal mask only the rows that look back are used.

Source: Shaw, Uszkoreit and Vaswani, "Self-Attention with Relative Position Representations" (2018), arXiv:1803.02155.
Beyond training length: defined everywhere; distances beyond K are one class, as in training.
Checked against: transformers Wav2Vec2-BERT (keys); plain loops from the paper (values).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings.base import Encoding, Layer, Shape
from posbench.options import Count


class Shaw(Encoding):
    def __init__(self, shape: Shape, max_distance: Count = 16, values: bool = True) -> None:
        super().__init__(shape)
        self.max_distance = max_distance
        size = (shape.n_layers, 2 * max_distance + 1, shape.head_dim)
        self.keys = nn.Parameter(torch.randn(size) * 0.02)
        self.values = nn.Parameter(torch.randn(size) * 0.02) if values else None

    def bias(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        by_row = q @ self.keys[layer.index].mT * self.logit_scale  # (B, H, Tq, 2K+1)
        if layer.consecutive and layer.causal:  # all but the last K keys are K or more back
            far, near, _ = by_row.tensor_split((1, 1 + self.max_distance), dim=-1)
            return _laid_out(near - far, k.shape[2]) + far
        return by_row.gather(-1, self._table_rows(layer).expand(*q.shape[:3], -1))

    def attend(self, logits: Tensor, v: Tensor, layer: Layer) -> Tensor:
        if self.values is None:
            return super().attend(logits, v, layer)
        weights, table = logits.softmax(-1), self.values[layer.index]
        out = weights @ v.to(weights.dtype)
        if layer.consecutive and layer.causal:
            far, near, _ = table.tensor_split((1, 1 + self.max_distance))
            return out + _diagonals(weights, self.max_distance) @ (near - far) + far  # the weights of a row sum to 1
        bins = weights.new_zeros(*weights.shape[:-1], len(table))
        return out + bins.scatter_add(-1, self._table_rows(layer).expand_as(weights), weights) @ table

    def _table_rows(self, layer: Layer) -> Tensor:
        """Return the table row of each pair, (1|B, 1, Tq, Tk): row 0 is K or more back, row K the query itself."""
        furthest = self.max_distance
        return ((-layer.distance).clamp(-furthest, furthest).round().long() + furthest)[:, None]


# Rows with one number too many, read as rows without it, each begin one place later than the row before.
def _laid_out(near: Tensor, keys: int) -> Tensor:
    """Return values (B, H, Tq, K) for the K keys up to each of the last queries as (B, H, Tq, keys), 0 elsewhere."""
    batch, heads, rows, width = near.shape
    wide = F.pad(near, (keys - rows, rows)).flatten(2)[..., :-rows]
    return wide.view(batch, heads, rows, -1)[..., width - 1 :]


def _diagonals(x: Tensor, width: int) -> Tensor:
    """Return of x (B, H, Tq, Tk) the last `width` keys up to each of the last queries: (B, H, Tq, width)."""
    batch, heads, rows, keys = x.shape
    wide = F.pad(F.pad(x, (width - 1, 0)).flatten(2), (0, rows))
    return wide.view(batch, heads, rows, -1)[..., keys - rows : keys - rows + width]
