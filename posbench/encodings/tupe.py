"""TUPE: transformers with untied positional encoding, where words attend to words and positions to positions.

    logits_ij = [q_i·k_j + (Q n_i)·(K n_j)] / sqrt(2d) + b_(i-j),   n_i = LayerNorm(p_i)

The train_length vectors p, the normalisation and Q, K (with biases) are shared by all layers. With `relative`, the
paper's TUPE-R, b is T5's bucketed bias, with T5's defaults and one table for all layers; without it, TUPE-A, 0.

Source: Ke, He and Liu, "Rethinking Positional Encoding in Language Pre-training" (2020), arXiv:2006.15595, section 3;
the normalisation and the biases are the authors' code's. Without its untying of [CLS].
Beyond training length: undefined, since p has no further vectors; such inputs are refused.
Checked against: plain loops from the paper; the bias, transformers T5Attention.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings.absolute import check_whole
from posbench.encodings.base import Encoding, Layer, Shape
from posbench.encodings.t5 import T5Bias


class TUPE(Encoding):
    whole_positions = True

    def __init__(self, shape: Shape, relative: bool = False) -> None:
        super().__init__(shape)
        self.max_length = shape.train_length
        self.table = nn.Parameter(torch.randn(shape.train_length, shape.d_model) * 0.02)
        self.norm = nn.LayerNorm(shape.d_model)
        self.projection = nn.Linear(shape.d_model, 2 * shape.n_heads * shape.head_dim)  # Q and K
        nn.init.normal_(self.projection.weight, std=0.02)
        nn.init.zeros_(self.projection.bias)
        self.relative = T5Bias(shape, rate=1.0) if relative else None
        vars(self)["overridden"] = self.overridden - (set() if relative else {"distance_bias"})

    @property
    def logit_scale(self) -> float:
        return float((2 * self.shape.head_dim) ** -0.5)

    def make_tables(self, positions: Tensor) -> tuple[Tensor, ...]:  # of queries and keys, (1|B, H, T, Dh) each
        check_whole(self, positions)
        heads = self.projection(self.norm(F.embedding(positions, self.table)))
        return heads.unflatten(-1, (2, self.shape.n_heads, -1)).transpose(1, 3).unbind(2)

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        queries, keys = (table.expand(len(q), -1, -1, -1) for table in layer.tables)
        return torch.cat((q, queries), dim=-1), torch.cat((k, keys), dim=-1)

    def distance_bias(self, distance: Tensor, layer: Layer) -> Tensor | None:
        return None if self.relative is None else self.relative.distance_bias(distance, layer)
