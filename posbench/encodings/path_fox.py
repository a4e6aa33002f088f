"""PaTH with a forget gate (PaTH-FoX): each token reflects earlier keys and sets how fast they fade.

    logits_ij = (q_i · (H_i H_{i-1} ... H_{j+1}) k_j + sum over t = j+1 .. i of ln f_t) / sqrt(d)

The reflections H_t are those of `path`, the gates f_t = sigmoid(w_h·x_t + b_h) those of `fox`. As in the authors' code,
and unlike in `fox`, the logarithms too are divided by sqrt(d): keys fade more slowly here. With open gates (b large)
this is `path`; without reflections (beta = 0) it is `fox` with milder gates.

Source: Yang et al., "PaTH Attention: Position Encoding via Accumulating Householder Transformations" (2025),
arXiv:2505.16381, as in fla's layer with its forget gate; the paper's own equation could not be read. Gates start as
those of `fox`.
Beyond training length: defined everywhere; it fades at a rate that the text chooses.
Checked against: fla naive_path_attn.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings import _start as starts
from posbench.encodings.base import Layer, Shape
from posbench.encodings.path import PaTH


class PaTHFoX(PaTH):
    name = "path_fox"

    def __init__(
        self,
        shape: Shape,
        rank: int = 32,
        silu: bool = True,
        start: starts.Start = "normal",
        gate_bias: float = 0.0,
    ) -> None:
        super().__init__(shape, rank, silu, start)
        self.expect(math.isfinite(gate_bias), "gate_bias", gate_bias, "a finite number")
        self.gate = nn.Parameter(torch.randn(shape.n_layers, shape.n_heads, shape.d_model) * 0.02)
        self.gate_bias = nn.Parameter(torch.full((shape.n_layers, shape.n_heads), gate_bias))

    def prepare(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, ...]:
        """The reflections' vectors and strengths, and running sums of the log gates (B, H, T), fp32."""
        reflections = super().prepare(q, k, layer)
        assert layer.x is not None  # `super` has refused None
        kept = F.logsigmoid(F.linear(layer.x.float(), self.gate[layer.index], self.gate_bias[layer.index]))
        return *reflections, kept.mT.contiguous().cumsum(-1)

    def bias(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        total = layer.state[-1]
        return self.logit_scale * (total[:, :, layer.rows, None] - total[:, :, None, layer.keys])
