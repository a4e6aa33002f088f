"""Relative position representations (Shaw et al.).

Every clipped relative position has a learned vector for the keys and another for the values:

    logits_ij = q_i·(k_j + a_r) / sqrt(d),   output_i = sum over j of α_ij (v_j + b_r),   r = clip(j - i, -K, K)

The vectors a and b are shared by the heads and separate per layer. All distances beyond K share one vector. With a
causal mask only the K + 1 rows that look back are used; the table keeps all 2K + 1, as published.

The (T, T, d) tensor of vectors is never built: q_i·a_r is computed once for each of the 2K + 1 rows and gathered by r;
the attention weights are summed into 2K + 1 bins, which then multiply b.

Source: Shaw, Uszkoreit and Vaswani, "Self-Attention with Relative Position Representations" (2018), arXiv:1803.02155.
Beyond training length: defined everywhere; distances beyond K are one class, as in training.
Checked against: transformers Wav2Vec2-BERT (keys); plain loops from the paper (values).
"""

import torch
from torch import Tensor, nn

from posbench.encodings.base import Encoding, Layer, Shape


class Shaw(Encoding):
    def __init__(self, shape: Shape, max_distance: int = 16, values: bool = True) -> None:
        super().__init__(shape)
        self.expect(max_distance >= 1, "max_distance", max_distance, "a whole number of at least 1")
        self.max_distance = max_distance
        size = (shape.n_layers, 2 * max_distance + 1, shape.head_dim)
        self.keys = nn.Parameter(torch.randn(size) * 0.02)
        self.values = nn.Parameter(torch.randn(size) * 0.02) if values else None

    def bias(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        by_row = q.float() @ self.keys[layer.index].mT * self.logit_scale  # (B, H, Tq, 2K+1)
        return by_row.gather(-1, self._table_rows(layer).expand(*by_row.shape[:3], -1))

    def attend(self, logits: Tensor, v: Tensor, layer: Layer) -> Tensor:
        if self.values is None:
            return super().attend(logits, v, layer)
        weights = logits.softmax(-1)
        bins = weights.new_zeros(*weights.shape[:-1], 2 * self.max_distance + 1)
        by_row = bins.scatter_add(-1, self._table_rows(layer).expand_as(weights), weights) @ self.values[layer.index]
        return weights @ v.to(weights.dtype) + by_row

    def _table_rows(self, layer: Layer) -> Tensor:
        """The table row of each pair: (1|B, 1, Tq, Tk); row 0 is K or more back, row K the query itself."""
        furthest = self.max_distance
        index = (-layer.distance).clamp(-furthest, furthest).round().long() + furthest
        return index[:, None]
