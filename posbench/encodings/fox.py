"""Forgetting attention (FoX): the data decides how fast the past fades.

Every token has a forget gate per head, computed from the layer's input. The gates of all tokens after a key, up to and
including the query, lower the key's logit:

    f_t = sigmoid(w_h·x_t + b_h),   bias_ij = sum over t = j+1 .. i of ln f_t = F_i - F_j,   F = cumulative sum of ln f

With w = 0 this is ALiBi with slope -ln sigmoid(b). Order is that of the tokens; position numbers are not used.

With b = 0 at the start, a key loses half of its weight after one token and nearly all of it after ten. The model then
learns to copy far more slowly than with `gate_bias: 2`.

Source: Lin et al., "Forgetting Transformer: Softmax Attention with a Forget Gate" (2025), arXiv:2503.02130. Its "Pro"
block is `fox_pro`.
Beyond training length: defined everywhere; like ALiBi it fades, at a rate that the text chooses.
Checked against: fla-core naive_forgetting_attn and x-transformers DataDependentAlibi.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings.base import Encoding, Layer, Shape


class FoX(Encoding):
    history = frozenset({"x"})

    def __init__(self, shape: Shape, gate_bias: float = 0.0) -> None:
        super().__init__(shape)
        self.expect(math.isfinite(gate_bias), "gate_bias", gate_bias, "a finite number")
        self.weight = nn.Parameter(torch.randn(shape.n_layers, shape.n_heads, shape.d_model) * 0.02)
        self.gate_bias = nn.Parameter(torch.full((shape.n_layers, shape.n_heads), gate_bias))

    def prepare(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, ...]:
        x = self.given(layer.x, "reads its gates from")
        # sums over thousands of gates need fp32
        gates = F.linear(x.float(), self.weight[layer.index], self.gate_bias[layer.index])  # (B, T, H)
        return (self.kept(gates).mT.contiguous().cumsum(-1),)  # (B, H, T)

    def kept(self, gates: Tensor) -> Tensor:
        """Logarithm of the share of earlier weights that each token keeps."""
        return F.logsigmoid(gates)

    def bias(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        (total,) = layer.state
        return total[:, :, layer.rows, None] - total[:, :, None, layer.keys]

    def key_bias(self, layer: Layer) -> Tensor:
        (total,) = layer.state
        return -total
