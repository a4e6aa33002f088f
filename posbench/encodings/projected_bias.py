"""A bias that each query mixes from learned curves over distance.

All heads of a layer share a few curves, each with one number per distance. The layer's input gives, per query and head,
the weight of each curve:

    logits_ij = q_i·k_j / sqrt(d) + sum_c (W_h x_i)_c · curve_c(i - j),   0 beyond `extent` distances

A token can thus prefer near or far keys, depending on the text. The curves end at train_length, since training shows
all these distances. Those of the published model end at 1024, or at the window of its windowed layers. Both factors
start normal with deviation 0.02.

Source: relative logits of the Inkling model (Thinking Machines), which has no paper; read in transformers' models.
Beyond training length: defined everywhere; keys beyond the extent carry no bias, so that all of them look equally far.
Checked against: transformers InklingRelativeLogits and x-transformers RelativeProjPositionalBias.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings.base import Encoding, Layer, Shape
from posbench.errors import UserError

DEVIATION = 0.02


class ProjectedBias(Encoding):
    name = "projected_bias"
    whole_positions = True

    def __init__(self, shape: Shape, extent: int | None = None, curves: int = 16) -> None:
        super().__init__(shape)
        self.expect(extent is None or extent >= 1, "extent", extent, "at least 1 distance, or null for train_length")
        self.expect(curves >= 1, "curves", curves, "at least 1")
        self.extent = extent or shape.train_length
        self.weight = nn.Parameter(torch.randn(shape.n_layers, shape.n_heads, curves, shape.d_model) * DEVIATION)
        self.curves = nn.Parameter(torch.randn(shape.n_layers, curves, self.extent) * DEVIATION)

    def prepare(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, ...]:
        x = self.given(layer.x, "mixes its curves by")
        mixtures = F.linear(x.float(), self.weight[layer.index].float().flatten(0, 1))
        return (mixtures.view(*mixtures.shape[:2], *self.weight.shape[1:3]).transpose(1, 2),)  # (B, H, T, curves)

    def bias(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        (mixtures,) = layer.state
        if layer.distance.is_floating_point():
            raise UserError(f"'{self.name}' has no bias between whole distances: expected integer positions")
        own = mixtures[:, :, layer.rows] @ self.curves[layer.index].float()  # (B, H, Tq, extent)
        distance = layer.distance[:, None]
        index = distance.clamp(0, self.extent - 1).expand(*own.shape[:3], -1)
        return own.gather(-1, index).masked_fill((distance < 0) | (distance >= self.extent), 0)
