"""Transformer-XL's relative attention: queries meet the content of keys and a sinusoid of their distance.

    logits_ij = [(q_i + u_h)·k_j + (q_i + v_h)·(W_h rho_(i-j))] / sqrt(d),   rho_r = [sin f_p r | cos f_p r]

f_p = base^(-2p/D), p = 0 .. D/2-1 with D the width of the model; u, v (H, d) and W (H, d, D) are learned per layer.
With [a | b] = Wᵀ(q_i + v), a sinusoid of i - j splits into a product of D channels, whose key side depends only on j:

    a sin(f i - f j) + b cos(f i - f j) = (a sin f i + b cos f i) cos f j + (b sin f i - a cos f i) sin f j

Source: Dai et al., "Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context" (2019), arXiv:1901.02860,
section 3.3. Without its memory of earlier segments and its clamping of far distances.
Beyond training length: defined everywhere; distances never trained have sinusoids never seen.
Checked against: transformers XLNet; plain loops from the paper at positions that jump.
"""

import torch
from torch import Tensor, nn

from posbench.encodings import rope as rotary
from posbench.encodings.base import Encoding, Layer, Shape, part_of
from posbench.errors import UserError
from posbench.options import Above1


class TransformerXL(Encoding):
    name = "transformer_xl"

    def __init__(self, shape: Shape, base: Above1 = 10000.0) -> None:
        super().__init__(shape)
        if shape.d_model % 2:
            raise UserError(f"d_model is {shape.d_model}: {self.name} has as many sines as cosines and needs it even")
        self.base = base
        heads = (shape.n_layers, shape.n_heads, shape.head_dim)
        self.content = nn.Parameter(torch.randn(heads) * 0.02)  # u
        self.position = nn.Parameter(torch.randn(heads) * 0.02)  # v
        self.projection = nn.Parameter(torch.randn(*heads, shape.d_model) * 0.02)  # W

    def make_tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return sines and cosines of positions, (1|B, 1, T, D/2) each."""
        angles = rotary.angles(positions, rotary.frequencies(self.shape.d_model, self.base))
        turns = rotary.turns(angles, positions.device)
        return turns.imag, turns.real

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        return q + self.content[layer.index, :, None], k

    def prepare(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        """Return the sides of the position term, of queries (B, H, T, D), scaled, and of keys (1|B, 1, T, D)."""
        sine, cosine = layer.tables
        projected = (q + self.position[layer.index, :, None]) * self.logit_scale @ self.projection[layer.index]
        a, b = projected.chunk(2, dim=-1)
        return torch.cat((a * sine + b * cosine, b * sine - a * cosine), -1), torch.cat((cosine, sine), -1)

    def bias(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        queries, keys = layer.state
        return queries[:, :, layer.rows] @ part_of(keys, layer.keys).mT
