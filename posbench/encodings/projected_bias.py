"""A bias that each query mixes from learned curves over distance.

    logits_ij = q_i·k_j / sqrt(d) + sum_c (W_h x_i)_c · curve_c(i - j),   0 beyond `extent` distances

All heads of a layer share the curves, which end at train_length. Both factors start normal with deviation 0.02.

Source: relative logits of the Inkling model (Thinking Machines), which has no paper; read in transformers' models.
Beyond training length: defined everywhere; keys beyond the extent carry no bias, so that all of them look equally far.
Checked against: transformers InklingRelativeLogits and x-transformers RelativeProjPositionalBias.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings.base import Encoding, Layer, Shape
from posbench.errors import UserError
from posbench.options import Count


class ProjectedBias(Encoding):
    name = "projected_bias"
    whole_positions = True

    def __init__(self, shape: Shape, extent: Count | None = None, curves: Count = 16) -> None:
        super().__init__(shape)
        self.extent = extent or shape.train_length
        self.weight = nn.Parameter(torch.randn(shape.n_layers, shape.n_heads, curves, shape.d_model) * 0.02)
        self.curves = nn.Parameter(torch.randn(shape.n_layers, curves, self.extent) * 0.02)

    def prepare(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor:  # the weight of each curve, (B, H, T, curves)
        mixtures = F.linear(self.given(layer.x, "mixes its curves by"), self.weight[layer.index].flatten(0, 1))
        return mixtures.view(*mixtures.shape[:2], self.shape.n_heads, -1).transpose(1, 2)

    def bias(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        distance = layer.distance[:, None]
        if distance.is_floating_point():
            raise UserError(f"'{self.name}' has no bias between whole distances: expected integer positions")
        by_distance = layer.state[:, :, layer.rows] @ self.curves[layer.index]  # (B, H, Tq, extent)
        index = distance.clamp(0, self.extent - 1).expand(*by_distance.shape[:3], -1)
        return by_distance.gather(-1, index).masked_fill((distance < 0) | (distance >= self.extent), 0)
