"""FoX in its "Pro" block: keys and values blended with those of the token before, norms, and a gate on the output.

The forget gates and the bias are those of `fox`. Each other part has an option:

    kv_shift       k'_t = a_t k_(t-1) + (1 - a_t) k_t,   a_t = sigmoid(w_h·x_t) per head; likewise v, with other a_t
    qk_norm        q and k are divided by their rms in each head, after the shift; a learned weight per channel
    output_norm    so is the output of each head
    output_gate    the output is multiplied by sigmoid(W x), channel by channel, after its norm

The token before the first counts as 0. The output gate costs as many parameters as a projection. The authors narrow the
MLP in return; posbench does not.

Source: Lin et al., "Forgetting Transformer: Softmax Attention with a Forget Gate" (2025), arXiv:2503.02130, as in the
authors' layer: epsilon 1e-5 under q and k, 1e-6 under the output; maps start from N(0, 0.02), norms at 1. Without RoPE.
Beyond training length: defined everywhere; like FoX it fades, at a rate that the text chooses.
Checked against: fla-core naive_forgetting_attn, given q, k and v that plain loops have shifted and normed.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings.base import Layer, Shape
from posbench.encodings.fox import FoX


class FoXPro(FoX):
    name = "fox_pro"

    def __init__(
        self,
        shape: Shape,
        gate_bias: float = 0.0,
        kv_shift: bool = True,
        qk_norm: bool = True,
        output_norm: bool = True,
        output_gate: bool = True,
    ) -> None:
        super().__init__(shape, gate_bias)
        heads = {"q": shape.n_heads, "k": shape.n_kv_heads, "v": shape.n_kv_heads, "output": shape.n_heads}
        shifted, normed = ["k", "v"] * kv_shift, ["q", "k"] * qk_norm + ["output"] * output_norm
        self.shifts = nn.ParameterDict({name: _map(shape, heads[name]) for name in shifted})
        self.norms = nn.ParameterDict(
            {name: nn.Parameter(torch.ones(shape.n_layers, heads[name], 1, shape.head_dim)) for name in normed}
        )
        self.output_gate = _map(shape, shape.n_heads * shape.head_dim) if output_gate else None

    @property
    def hooks(self) -> frozenset[str]:
        parts = {
            "rotate": "k" in self.shifts or "q" in self.norms,
            "map_values": "v" in self.shifts,
            "map_outputs": "output" in self.norms or self.output_gate is not None,
        }
        return self.overridden - {hook for hook, used in parts.items() if not used}

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        k = self._shifted("k", k, layer.x, layer.index)
        return self._normed("q", q, layer.index, 1e-5), self._normed("k", k, layer.index, 1e-5)

    def map_values(self, v: Tensor, layer: Layer) -> Tensor:
        return self._shifted("v", v, layer.x, layer.index)

    def map_outputs(self, out: Tensor, layer: Layer) -> Tensor:
        out = self._normed("output", out, layer.index, 1e-6)
        if self.output_gate is None:
            return out
        gates = self._read(
            self.output_gate[layer.index], None if layer.x is None else layer.x[:, layer.rows]
        ).sigmoid()  # (B, Tq, H Dh)
        by_head = gates.view(*gates.shape[:2], self.shape.n_heads, -1).transpose(1, 2)
        return (out.float() * by_head).to(out.dtype)

    def _shifted(self, name: str, a: Tensor, x: Tensor | None, layer: int) -> Tensor:
        """Keys or values (B, H, T, Dh), maybe shared by groups of heads, blended with those of the token before."""
        if name not in self.shifts:
            return a
        share = self._read(self.shifts[name][layer], x).sigmoid().mT[..., None]  # (B, Hkv, T, 1)
        share = share.repeat_interleave(a.shape[1] // share.shape[1], dim=1)
        now = a.float()
        return torch.lerp(now, F.pad(now[:, :, :-1], (0, 0, 1, 0)), share).to(a.dtype)

    def _normed(self, name: str, a: Tensor, layer: int, epsilon: float) -> Tensor:
        """(B, H, T, Dh) divided by its rms over the channels of each head."""
        if name not in self.norms:
            return a
        weight: Tensor = self.norms[name][layer]
        weight = weight.repeat_interleave(a.shape[1] // len(weight), dim=0)
        divided: Tensor = F.rms_norm(a.float(), a.shape[-1:], eps=epsilon)
        return (divided * weight).to(a.dtype)

    def _read(self, weight: Tensor, x: Tensor | None) -> Tensor:
        """A linear map of the layer's input, (B, T, ...) fp32."""
        x = self.given(x, "reads shifts and gates from")
        return F.linear(x.float(), weight)


def _map(shape: Shape, width: int) -> nn.Parameter:
    """Weights (layers, width, D) that read the layer's input."""
    return nn.Parameter(torch.randn(shape.n_layers, width, shape.d_model) * 0.02)
