"""Forget gates of every token, which lower the logits of all earlier keys: FoX, CABLE and FoX in its Pro block."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings.base import Encoding, Layer, Shape


class FoX(Encoding):
    """Forgetting attention (FoX): the data decides how fast the past fades.

    Every token has a forget gate per head. Those of all tokens after a key, the query's included, lower its logit:

        f_t = sigmoid(w_h·x_t + b_h),   bias_ij = sum over t = j+1 .. i of ln f_t = F_i - F_j,   F = cumulative ln f

    With w = 0 this is ALiBi with slope -ln sigmoid(b). Order is that of the tokens; position numbers are not used. At
    the start b = 0 halves a key's weight per token; the model learns to copy far faster from `gate_bias: 2`.

    Source: Lin et al., "Forgetting Transformer: Softmax Attention with a Forget Gate" (2025), arXiv:2503.02130.
    Beyond training length: defined everywhere; like ALiBi it fades, at a rate that the text chooses.
    Checked against: fla-core naive_forgetting_attn and x-transformers DataDependentAlibi.
    """

    history = frozenset({"x"})

    def __init__(self, shape: Shape, gate_bias: float = 0.0) -> None:
        super().__init__(shape)
        self.weight = nn.Parameter(torch.randn(shape.n_layers, shape.n_heads, shape.d_model) * 0.02)
        self.gate_bias = nn.Parameter(torch.full((shape.n_layers, shape.n_heads), gate_bias))

    def prepare(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        """Return the sums of the log gates, (B, H, T)."""
        x = self.given(layer.x, "reads its gates from")
        gates = F.linear(x, self.weight[layer.index], self.gate_bias[layer.index])
        return self.log_gates(gates).mT.contiguous().cumsum(-1)

    def log_gates(self, gates: Tensor) -> Tensor:
        """Return the logarithm of the share of earlier weights that each token keeps."""
        return F.logsigmoid(gates)

    def bias(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        return layer.state[:, :, layer.rows, None] - layer.state[:, :, None, layer.keys]

    def key_bias(self, layer: Layer) -> Tensor:
        return -layer.state


class CABLE(FoX):
    """Context-aware biases (CABLE): a key's logit falls by a length of every token after it, the query's included.

        logits_ij = q_i·k_j / sqrt(d) - sum over t = j+1 .. i of softplus(w_h·x_t + b_h)

    That is `fox` with the signs of w and b turned. Order is that of the tokens; position numbers are not used.

    Source: Veisi et al., "Context-aware Biases for Length Extrapolation" (2025), arXiv:2503.08067, as the authors' code
    has it (axiomlab/Cable), but with the 1/sqrt(d).
    Beyond training length: defined everywhere; like ALiBi it fades, at a rate that the text chooses.
    Checked against: plain loops, and fla-core naive_forgetting_attn with turned signs.
    """

    def log_gates(self, gates: Tensor) -> Tensor:
        return -F.softplus(gates)


class FoXPro(FoX):
    """FoX in its "Pro" block: keys and values blended with those of the token before, norms, and a gate on the output.

        kv_shift       k'_t = a_t k_(t-1) + (1 - a_t) k_t,   a_t = sigmoid(w_h·x_t) per head; likewise v, with other a_t
        qk_norm        q and k are divided by their rms in each head, after the shift; a learned weight per channel
        output_norm    so is the output of each head
        output_gate    the output is multiplied by sigmoid(W x), channel by channel, after its norm

    Source: Lin et al., "Forgetting Transformer: Softmax Attention with a Forget Gate" (2025), arXiv:2503.02130, as in
    the authors' layer without RoPE: epsilon 1e-5 under q and k, 1e-6 under the output; maps start from N(0, 0.02).
    Beyond training length: defined everywhere; like FoX it fades, at a rate that the text chooses.
    Checked against: fla-core naive_forgetting_attn, given q, k and v that plain loops have shifted and normed.
    """

    name = "fox_pro"

    def __init__(
        self, shape: Shape, gate_bias: float = 0.0, kv_shift: bool = True, qk_norm: bool = True,
        output_norm: bool = True, output_gate: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(shape, gate_bias)

        def linear(width: int) -> nn.Parameter:  # reads the layer's input
            return nn.Parameter(torch.randn(shape.n_layers, width, shape.d_model) * 0.02)

        def ones(heads: int) -> nn.Parameter:
            return nn.Parameter(torch.ones(shape.n_layers, heads, 1, shape.head_dim))

        heads = {"q": shape.n_heads, "k": shape.n_kv_heads, "v": shape.n_kv_heads, "output": shape.n_heads}
        normed = ["q", "k"] * qk_norm + ["output"] * output_norm
        self.shifts = nn.ParameterDict({name: linear(heads[name]) for name in ["k", "v"] * kv_shift})
        self.norms = nn.ParameterDict({name: ones(heads[name]) for name in normed})
        self.output_gate = linear(shape.n_heads * shape.head_dim) if output_gate else None
        used = {"rotate": kv_shift or qk_norm, "map_values": kv_shift, "map_outputs": output_norm or output_gate}
        vars(self)["overridden"] = self.overridden - {hook for hook in used if not used[hook]}

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        return self._normed("q", q, layer, 1e-5), self._normed("k", self._shifted("k", k, layer), layer, 1e-5)

    def map_values(self, v: Tensor, layer: Layer) -> Tensor:
        return self._shifted("v", v, layer)

    def map_outputs(self, out: Tensor, layer: Layer) -> Tensor:
        out = self._normed("output", out, layer, 1e-6)
        if self.output_gate is None:
            return out
        gates = self._gates(self.output_gate, layer)[:, layer.rows]  # (B, Tq, H Dh)
        return out * gates.view(*gates.shape[:2], self.shape.n_heads, -1).transpose(1, 2)

    def _shifted(self, name: str, a: Tensor, layer: Layer) -> Tensor:
        if name not in self.shifts:
            return a
        share = self._gates(self.shifts[name], layer).mT[..., None]  # (B, Hkv, T, 1)
        before = F.pad(a[:, :, :-1], (0, 0, 1, 0))
        return torch.lerp(a, before, share.repeat_interleave(a.shape[1] // share.shape[1], dim=1))

    def _normed(self, name: str, a: Tensor, layer: Layer, epsilon: float) -> Tensor:
        if name not in self.norms:
            return a
        weight: Tensor = self.norms[name][layer.index]
        return F.rms_norm(a, a.shape[-1:], eps=epsilon) * weight.repeat_interleave(a.shape[1] // len(weight), dim=0)

    def _gates(self, weight: Tensor, layer: Layer) -> Tensor:
        """Return gates (B, T, ...) from weights of all layers."""
        return F.linear(self.given(layer.x, "reads shifts and gates from"), weight[layer.index]).sigmoid()
