"""Transformer-XL's relative attention.

Queries meet the content of keys and their distance, each with a learned bias on the query. A distance is a sinusoid
that each layer projects into its heads:

    logits_ij = [(q_i + u_h)·k_j + (q_i + v_h)·(W_h rho_(i-j))] / sqrt(d),   rho_r = [sin f_p r | cos f_p r]

f_p = base^(-2p/D), p = 0 .. D/2-1 with D the width of the model; u, v (H, d) and W (H, d, D) are learned per layer.

With [a | b] = Wᵀ(q_i + v), a sinusoid of i - j splits:

    a sin(f i - f j) + b cos(f i - f j) = (a sin f i + b cos f i) cos f j + (b sin f i - a cos f i) sin f j

so the position term is one product of D channels, and its key side depends only on j.

Source: Dai et al., "Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context" (2019), arXiv:1901.02860,
section 3.3. Without its memory of earlier segments and its clamping of far distances.
Beyond training length: defined everywhere; distances never trained have sinusoids never seen.
Checked against: transformers XLNet; plain loops from the paper at positions that jump.
"""

import math

import torch
from torch import Tensor, nn

from posbench.encodings import _rotary as rotary
from posbench.encodings.base import Encoding, Layer, Shape, part_of
from posbench.errors import UserError


class TransformerXL(Encoding):
    name = "transformer_xl"

    def __init__(self, shape: Shape, base: float = 10000.0) -> None:
        super().__init__(shape)
        self.expect(1 < base < math.inf, "base", base, "a number above 1")
        if shape.d_model % 2:
            raise UserError(f"d_model is {shape.d_model}: {self.name} has as many sines as cosines and needs it even")
        self.base = base
        heads = (shape.n_layers, shape.n_heads, shape.head_dim)
        self.content = nn.Parameter(torch.randn(heads) * 0.02)  # u
        self.position = nn.Parameter(torch.randn(heads) * 0.02)  # v
        self.projection = nn.Parameter(torch.randn(*heads, shape.d_model) * 0.02)  # W

    def make_tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.waves(positions, positions.device)

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        return (q.float() + self.content[layer.index, :, None]).to(q.dtype), k

    def prepare(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, ...]:
        """The two sides of the position term: queries (B, H, T, D), scaled, and positions (1|B, 1, T, D), fp32."""
        sine, cosine = layer.tables
        asking = (q.float() + self.position[layer.index, :, None]) * self.logit_scale
        a, b = (asking @ self.projection[layer.index]).chunk(2, dim=-1)
        return torch.cat((a * sine + b * cosine, b * sine - a * cosine), -1), torch.cat((cosine, sine), -1)

    def bias(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        asked, told = layer.state
        return asked[:, :, layer.rows] @ part_of(told, layer.keys).mT

    def waves(self, positions: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Sines and cosines of positions (1|B, T): (1|B, 1, T, D/2) each, fp32."""
        inv_freq = rotary.frequencies(self.shape.d_model, self.base, positions.device)
        turns = rotary.turns(rotary.angles(positions, inv_freq), device)
        return turns.imag, turns.real
