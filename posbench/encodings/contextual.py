"""Order from the content: gates of tokens and of pairs, reflections, and a stick that
keys break.
"""

import math
from collections.abc import Callable
from typing import Annotated

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor, nn

from posbench.encodings.base import Encoding, Layer, Shape, part_of, split_heads
from posbench.encodings.rope import check_pairs
from posbench.options import Count, Positive, Start


def draw_layers(encoding: nn.Module, start: Start) -> None:
    """Draw an encoding's linear maps and convolutions from N(0, 0.02), biases 0;
    `torch` keeps torch's own draw.
    """
    if start == "torch":
        return
    for layer in encoding.modules():
        if isinstance(layer, nn.Linear | nn.Conv1d):
            nn.init.normal_(layer.weight, std=0.02)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def linears(n: int, inputs: int, outputs: int, bias: bool = False) -> nn.ModuleList:
    """Return a linear map for each of n layers."""
    return nn.ModuleList(nn.Linear(inputs, outputs, bias=bias) for _ in range(n))


def convolutions(n: int, channels: int, width: int) -> nn.ModuleList:
    """Return a convolution for each of n layers, of each channel by itself."""
    layers = nn.ModuleList()
    for _ in range(n):
        layer = nn.Conv1d(channels, channels, width, groups=channels, bias=False)
        layers.append(layer)
    return layers


def causal_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """Return the sum over s = 0 .. K-1 of weight_(K-1-s) x_(t-s), (B, T, C), for x (B,
    T, C) and weight (C, K).
    """
    length, width = x.shape[1], weight.shape[1]
    # torch's own convolution takes three times as long on CPUs
    padded = F.pad(x, (0, 0, width - 1, 0))
    sums = padded[:, :length] * weight[:, 0]
    for shift in range(1, width):
        sums = sums + padded[:, shift : shift + length] * weight[:, shift]
    return sums.to(x.dtype)


def low_rank(n: int, inputs: int, rank: int, outputs: int) -> nn.ModuleList:
    """Return a linear map of a low rank for each of n layers."""
    layers = nn.ModuleList()
    for _ in range(n):
        down = nn.Linear(inputs, rank, bias=False)
        up = nn.Linear(rank, outputs, bias=False)
        layers.append(nn.Sequential(down, up))
    return layers


def unit(a: Tensor) -> Tensor:
    """Return vectors (..., C) with length 1: a / sqrt(|a|² + 1e-6)."""
    squares = a.square().sum(-1, keepdim=True)
    return a * (squares + 1e-6).rsqrt()


def kernels_of_heads(shape: Shape, names: str, width: int) -> nn.ParameterDict:
    """Return weights of short convolutions for each channel of the heads of q, k or v,
    each (layers, H or Hkv, Dh, width), which start as those of torch's Conv1d.
    """
    heads = {"q": shape.n_heads, "k": shape.n_kv_heads, "v": shape.n_kv_heads}
    kernels = {}  # the last weight is the token's own
    for name in names:
        kernel = torch.empty(shape.n_layers, heads[name], shape.head_dim, width)
        kernel.uniform_(-1, 1)
        kernels[name] = nn.Parameter(kernel * width**-0.5)
    return nn.ParameterDict(kernels)


def convolved_heads(a: Tensor, kernel: Tensor) -> Tensor:
    """Return a (B, H, T, Dh), each channel convolved by a layer's kernel (H or Hkv, Dh,
    width).
    """
    group = a.shape[1] // len(kernel)
    kernel = kernel.repeat_interleave(group, dim=0)
    channels = a.transpose(1, 2).flatten(2)  # (B, T, H·Dh)
    mixed = causal_convolution(channels, kernel.flatten(0, 1))
    return split_heads(mixed, a.shape[1])


def sums_after_keys(cumulative: Tensor, layer: Layer) -> Tensor:
    """Return sums of a number per token, given cumulative ones (B, H, T), over the
    tokens after a key, the query's included: (B, H, Tq, Tk).
    """
    return cumulative[:, :, layer.rows, None] - cumulative[:, :, None, layer.keys]


class FoX(Encoding):
    """Forgetting attention (FoX): forget gates of all tokens after a key, the query's
    included, lower its logit.

        f_t = sigmoid(w_h·x_t + b_h),
        logits_ij = q_i·k_j / sqrt(d) + sum over t = j+1 .. i of ln f_t
                  = q_i·k_j / sqrt(d) + c_i - c_j,   c = cumulative ln f

    Source: Lin et al., "Forgetting Transformer: Softmax Attention with a Forget Gate"
    (2025), arXiv:2503.02130.
    Beyond training length: defined everywhere; far keys fade as with ALiBi, at a rate
    that the text sets.
    Checked against: fla-core naive_forgetting_attn and x-transformers
    DataDependentAlibi.
    """

    history = frozenset({"x"})
    # ln f from w_h·x_t + b_h; CABLE has another
    log_gates: Callable[[Tensor], Tensor] = staticmethod(F.logsigmoid)

    def __init__(self, shape: Shape, gate_bias: float = 0.0) -> None:
        super().__init__(shape)
        self.weight = nn.Parameter(  # w
            torch.randn(shape.n_layers, shape.n_heads, shape.d_model) * 0.02
        )
        self.gate_bias = nn.Parameter(  # b
            torch.full((shape.n_layers, shape.n_heads), gate_bias)
        )

    def prepare(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        x = self.given(layer.x, "reads its gates from")
        # w_h·x_t + b_h, (B, T, H)
        z = F.linear(x, self.weight[layer.index], self.gate_bias[layer.index])
        log_f = self.log_gates(z).mT.contiguous()  # (B, H, T)
        return log_f.cumsum(-1)  # c

    def bias(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        return sums_after_keys(layer.state, layer)  # c_i - c_j

    def key_bias(self, layer: Layer) -> Tensor:
        return -layer.state  # c_i is the same for all keys of a query


class CABLE(FoX):
    """Context-aware biases (CABLE): each token after a key, the query's included,
    lowers the key's logit by a length.

        logits_ij = q_i·k_j / sqrt(d) - sum over t = j+1 .. i of softplus(w_h·x_t + b_h)

    Source: Veisi et al. (2025), arXiv:2503.08067, and the authors' code
    (axiomlab/Cable), but with the 1/sqrt(d).
    Beyond training length: defined everywhere; far keys fade as with ALiBi, at a rate
    that the text sets.
    Checked against: plain loops, and fla-core naive_forgetting_attn with opposite
    signs.
    """

    log_gates = staticmethod(lambda gates: -F.softplus(gates))


class FoXPro(FoX):
    """FoX in its "Pro" block: keys and values blended with those of the token before,
    norms, and a gate on the output.

        kv_shift               k'_t = a_t k_(t-1) + (1 - a_t) k_t,
                               a_t = sigmoid(w_h·x_t) per head; likewise v
        qk_norm, output_norm   q, k and the output are divided by their rms in each
                               head; a learned weight per channel
        output_gate            the output is multiplied by sigmoid(W x), channel by
                               channel, after its norm

    Source: Lin et al. (2025), arXiv:2503.02130, as in the authors' layer without RoPE.
    Beyond training length: defined everywhere; far keys fade as with FoX, at a rate
    that the text sets.
    Checked against: fla-core naive_forgetting_attn, given q, k and v that plain loops
    have shifted and normed.
    """

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
        shifts = {}
        if kv_shift:
            shifts["k"] = self._linear(shape.n_kv_heads)
            shifts["v"] = self._linear(shape.n_kv_heads)
        self.shifts = nn.ParameterDict(shifts)

        norms = {}
        if qk_norm:
            norms["q"] = self._ones(shape.n_heads)
            norms["k"] = self._ones(shape.n_kv_heads)
        if output_norm:
            norms["output"] = self._ones(shape.n_heads)
        self.norms = nn.ParameterDict(norms)

        self.output_gate = None
        if output_gate:
            self.output_gate = self._linear(shape.n_heads * shape.head_dim)

    def _linear(self, width: int) -> nn.Parameter:
        """Return a map of each layer's input to `width` numbers."""
        size = (self.shape.n_layers, width, self.shape.d_model)
        return nn.Parameter(torch.randn(size) * 0.02)

    def _ones(self, n_heads: int) -> nn.Parameter:
        """Return the weights of a norm, one per channel of each layer's heads."""
        size = (self.shape.n_layers, n_heads, 1, self.shape.head_dim)
        return nn.Parameter(torch.ones(size))

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        k = self._shifted("k", k, layer)
        q = self._normed("q", q, layer, 1e-5)
        k = self._normed("k", k, layer, 1e-5)
        return q, k

    def map_values(self, v: Tensor, layer: Layer) -> Tensor:
        return self._shifted("v", v, layer)

    def map_outputs(self, out: Tensor, layer: Layer) -> Tensor:
        out = self._normed("output", out, layer, 1e-6)
        if self.output_gate is None:
            return out
        gates = self._gates(self.output_gate, layer)[:, layer.rows]  # (B, Tq, H·Dh)
        return out * split_heads(gates, self.shape.n_heads)

    def _shifted(self, name: str, a: Tensor, layer: Layer) -> Tensor:
        if name not in self.shifts:
            return a
        share = self._gates(self.shifts[name], layer).mT  # (B, Hkv, T)
        group = a.shape[1] // share.shape[1]
        share = share.repeat_interleave(group, dim=1)
        previous = F.pad(a[:, :, :-1], (0, 0, 1, 0))
        return torch.lerp(a, previous, share[..., None])

    def _normed(self, name: str, a: Tensor, layer: Layer, epsilon: float) -> Tensor:
        if name not in self.norms:
            return a
        weight: Tensor = self.norms[name][layer.index]  # (H or Hkv, 1, Dh)
        group = a.shape[1] // len(weight)
        normed = F.rms_norm(a, a.shape[-1:], eps=epsilon)
        return normed * weight.repeat_interleave(group, dim=0)

    def _gates(self, weight: Tensor, layer: Layer) -> Tensor:
        x = self.given(layer.x, "reads shifts and gates from")
        return F.linear(x, weight[layer.index]).sigmoid()


class Wall(Encoding):
    """Wall attention: forget gates for every channel.

        f_t = sigmoid(W x_t + b), a number per channel,    P = cumulative sum of ln f
        logits_ij = sum over channels n of q_in k_jn exp(P_in - P_jn) / sqrt(d)

    Source: fla's layer and plain form (by Tilde Research, 2026; no paper), without its
    gates of heads and of outputs.
    Beyond training length: defined everywhere; far keys fade as with FoX, at rates that
    the text sets.
    Checked against: fla naive_wall_attn.
    """

    history = frozenset({"x"})

    def __init__(self, shape: Shape, gate_bias: float = 8.0) -> None:
        super().__init__(shape)
        size = (shape.n_layers, shape.n_heads * shape.head_dim)
        self.weight = nn.Parameter(torch.randn(*size, shape.d_model) * 0.02)
        self.gate_bias = nn.Parameter(torch.full(size, gate_bias))

    def prepare(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        x = self.given(layer.x, "reads its gates from")
        gates = F.linear(x, self.weight[layer.index], self.gate_bias[layer.index])
        total = F.logsigmoid(gates).cumsum(1)  # P, (B, T, H·Dh)
        return split_heads(total, self.shape.n_heads)

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        return _faded(logits, self.logit_scale * q, k, layer.state, layer)


def _faded(logits: Tensor, q: Tensor, k: Tensor, total: Tensor, layer: Layer) -> Tensor:
    """Return the sums over channels n of q_in k_jn exp(P_in - P_jn), (B, H, Tq, Tk), P
    = `total` of all tokens; those of keys after their query stay as in `logits`.
    """
    # q exp(P) and k exp(-P) would overflow. For keys j up to m and queries i after m,
    # exp(P_m - P_j) and exp(P_i - P_m) are at most 1. So a text is split at m: one
    # product joins its halves, and each is split again.
    of_q = total[:, :, layer.rows]  # P
    of_k = total[:, :, layer.keys]

    # the columns of the queries' own keys
    first = layer.rows.start - layer.keys.start
    stop = first + q.shape[2]
    earlier, own, following = logits.tensor_split((first, stop), dim=-1)
    if first:
        earlier = _logits_across(q, of_q, k[:, :, :first], of_k[:, :, :first])
    among = _logits_among(q, k[:, :, first:stop], of_q)
    is_later = torch.ones_like(among[0, 0], dtype=torch.bool).triu(1)
    own = torch.where(is_later, own, among)
    return torch.cat((earlier, own, following), dim=-1)


def _logits_across(q: Tensor, of_q: Tensor, k: Tensor, of_k: Tensor) -> Tensor:
    """Return logits (..., M, N) of queries (..., M, Dh) and keys (..., N, Dh) before
    them all; `of_q`, `of_k` are P.
    """
    last = of_k[..., -1:, :].detach()  # its value cancels
    faded_q = q * (of_q - last).exp()
    faded_k = k * (last - of_k).exp()
    return faded_q @ faded_k.mT


def _logits_among(q: Tensor, k: Tensor, total: Tensor) -> Tensor:
    """Return logits (B, H, T, T) of queries and keys (B, H, T, Dh) of the same tokens,
    valid up to the query.
    """
    # tokens whose pairs are computed one by one, a power of two
    size = 4
    length = q.shape[2]
    padded_length = max(size, 1 << (length - 1).bit_length())
    missing = padded_length - length
    q = F.pad(q, (0, 0, 0, missing))
    k = F.pad(k, (0, 0, 0, missing))
    last = total[:, :, -1:].expand(-1, -1, missing, -1)
    total = torch.cat((total, last), dim=2)

    logits = _logits_of_pairs(q, k, total, size)
    while logits.shape[2] > 1:
        logits = _joined(logits, q, k, total)
    return logits[:, :, 0, :length, :length]


def _logits_of_pairs(q: Tensor, k: Tensor, total: Tensor, size: int) -> Tensor:
    """Return logits among the tokens of each block, (B, H, blocks, size, size), pair by
    pair.
    """
    q = _blocks(q, size)
    k = _blocks(k, size)
    total = _blocks(total, size)
    fading = total[..., :, None, :] - total[..., None, :, :]
    fading = fading.clamp(max=0).exp()
    products = q[..., :, None, :] * k[..., None, :, :]
    return (products * fading).sum(-1)


def _joined(logits: Tensor, q: Tensor, k: Tensor, total: Tensor) -> Tensor:
    """Return the logits of twice as large blocks, each of two neighbours."""
    size = logits.shape[-1]
    q = _blocks(q, size)[:, :, 1::2]  # of each second neighbour
    k = _blocks(k, size)[:, :, ::2]  # of each first one
    total = _blocks(total, size)
    total_of_queries = total[:, :, 1::2]
    total_of_keys = total[:, :, ::2]
    across = _logits_across(q, total_of_queries, k, total_of_keys)

    above = F.pad(logits[:, :, ::2], (0, size))
    below = torch.cat((across, logits[:, :, 1::2]), dim=-1)
    return torch.cat((above, below), dim=-2)


def _blocks(x: Tensor, size: int) -> Tensor:
    """Return x (B, H, T, ...) in blocks of tokens: (B, H, T / size, size, ...)."""
    return x.reshape(*x.shape[:2], -1, size, *x.shape[3:])


class CoPE(Encoding):
    """Contextual position encoding (CoPE): positions count only the tokens that matter,
    by a gate for each pair.

        g_ij = sigmoid(z_ij),   z_ij = q_i·k_j / sqrt(d)
        p_ij = sum over visible t = j .. i of g_it, at most P - 1 (P = `max_position`)
        logits_ij = z_ij + (1 - w)·q_i·e[floor p_ij] + w·q_i·e[ceil p_ij],
        w = p_ij - floor p_ij

    e: P learned vectors per layer, shared by its heads, 0 at the start.

    Source: Golovneva et al., "Contextual Position Encoding: Learning to Count What's
    Important", arXiv:2405.18719; the gate's 1/sqrt(d) as in its listing.
    Beyond training length: defined everywhere; counts beyond P - 1 are held there.
    Checked against: x-transformers CoPE.
    """

    def __init__(self, shape: Shape, max_position: Annotated[int, Ge(2)] = 64) -> None:
        super().__init__(shape)
        self.table = nn.Parameter(
            torch.zeros(shape.n_layers, max_position, shape.head_dim)
        )

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        e = self.table[layer.index]  # (P, Dh)
        u = q @ e.mT  # q_i·e[0] ... q_i·e[P - 1], (B, H, Tq, P); q is unscaled

        # later keys are not masked yet
        gates = logits.sigmoid() * layer.visible  # g, (B, H, Tq, Tk)
        p = gates.flip(-1).cumsum(-1).flip(-1)  # summed from the key to the query
        p = p.clamp(max=len(e) - 1)
        n = p.long().clamp(min=0)  # floor p; the clamp is for NaN only

        # (1 - w)·u[n] + w·u[n + 1] = u[n] + w·(u[n + 1] - u[n]). Where p is whole, w is
        # 0.
        to_next = F.pad(u.diff(dim=-1), (0, 1))  # u[n + 1] - u[n]; 0 at P - 1
        w = p.frac()
        logits = logits + u.gather(-1, n)
        return logits + w * to_next.gather(-1, n)


class TAPA(Encoding):
    """Token-aware phase attention (TAPA): half of the channels set how large a logit
    is, the others how it swings with distance.

        logits_ij = q_A·k_A / sqrt(d/2) · cos(2π |i - j|^alpha q_P·k_P / sqrt(d/2)),
        q = [q_A ; q_P]

    At the demo's size it needs `model.init=gpt2 training.learning_rate=0.0015`. With
    fan_in the first phases are random turns; at higher rates phases grow too fast. Loss
    after a million tokens with AdamW (seed 0): 4.4; with fan_in 5.6, at 0.003 5.9.

    Source: Wang et al. (2025), arXiv:2509.12635, equation 12 and the values of section
    4.1.
    Beyond training length: defined everywhere; twice the distance adds 7 % to a phase.
    Checked against: that equation in fp64, product by product.
    """

    def __init__(self, shape: Shape, alpha: Positive = 0.1) -> None:
        super().__init__(shape)
        check_pairs(self.name, shape)
        self.alpha = alpha

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        q_amplitude, q_phase = q.chunk(2, dim=-1)
        k_amplitude, k_phase = k.chunk(2, dim=-1)
        root = math.sqrt(q_phase.shape[-1])
        amplitude = q_amplitude @ k_amplitude.mT / root
        turns = q_phase @ k_phase.mT / root
        growth = layer.distance.abs().to(turns.dtype) ** self.alpha
        phase = 2 * math.pi * growth[:, None] * turns
        return amplitude * phase.cos()


class StickBreaking(Encoding):
    """Stick-breaking attention: each key, from the nearest on, breaks a share
    sigmoid(z) off the rest of a stick.

        A_ij = sigmoid(z_ij) · prod_{j < l < i} (1 - sigmoid(z_il)),
        z_ij = q_i·k_j / sqrt(d)
        o_i = sum_{j < i} A_ij v_j + rest_i v_i,
        rest_i = prod_{l < i} (1 - sigmoid(z_il)) = 1 - sum_{j < i} A_ij

    With `attend_current` the query's own key breaks the stick first; with `remainder:
    false` the rest is dropped.

    Source: Tan et al. (2024), arXiv:2410.17980, section 2; rest_i v_i as in the
    authors' code (IBM/dolomite-engine).
    Beyond training length: defined everywhere; far keys share what the near ones left,
    so little changes.
    Checked against: fla naive_stickbreaking_attn and worked weights.
    """

    def __init__(
        self, shape: Shape, attend_current: bool = False, remainder: bool = True
    ) -> None:
        super().__init__(shape)
        self.attend_current, self.remainder = attend_current, remainder

    def attend(self, logits: Tensor, v: Tensor, layer: Layer) -> Tensor:
        # the column of the key at the first query's position
        diagonal = layer.rows.start - layer.keys.start
        last = diagonal  # the nearest key that breaks the stick
        if not self.attend_current:
            last = diagonal - 1
        breaks = layer.visible & torch.ones_like(layer.visible).tril(last)
        hidden = torch.zeros_like(breaks, dtype=logits.dtype)
        hidden.masked_fill_(~breaks, -math.inf)

        # In logarithms: log beta = z - softplus(z), log(1 - beta) = -softplus(z).
        z = logits + hidden
        # summed over the key and all between it and the query
        claimed = F.softplus(z).flip(-1).cumsum(-1).flip(-1)
        output = (z - claimed).exp() @ v.to(z.dtype)
        if not self.remainder:
            return output
        rest = (-claimed[..., :1]).exp()
        own_values = v[:, :, diagonal : diagonal + output.shape[2]]
        return output + rest * own_values


class PaTH(Encoding):
    """PaTH attention: a key is multiplied by a reflection for each token between it and
    the query.

        logits_ij = q_i · (H_i H_{i-1} ... H_{j+1}) k_j / sqrt(d),
        H_t = I - beta_t w_t w_tᵀ

    w_t is a unit vector per head (of x, by a low rank 32, a causal convolution over
    three tokens, a SiLU), beta_t = 2 sigmoid(.) per head.

    Source: Yang et al. (2025), arXiv:2505.16381; SiLU (off: `silu: false`) and `start`
    as in their layer in fla.
    Beyond training length: defined everywhere; products get longer than in training,
    but no matrix enlarges a vector.
    Checked against: fla naive_path_attn, and the product of matrices in a plain loop.
    """

    history = frozenset({"x"})

    def __init__(
        self, shape: Shape, rank: Count = 32, silu: bool = True, start: Start = "normal"
    ) -> None:
        super().__init__(shape)
        self.silu = silu
        n, width = shape.n_layers, shape.n_heads * shape.head_dim
        self.down = linears(n, shape.d_model, rank)
        self.up = linears(n, rank, width)
        self.convolution = convolutions(n, width, 3)
        self.beta = linears(n, shape.d_model, shape.n_heads, bias=True)
        draw_layers(self, start)

    def prepare(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, ...]:
        x = self.given(layer.x, "makes its reflections from")
        kernel = self.convolution[layer.index].get_parameter("weight")[:, 0]
        of_tokens = self.up[layer.index](self.down[layer.index](x))  # (B, T, H·Dh)
        w = causal_convolution(of_tokens, kernel)
        if self.silu:
            w = F.silu(w)
        w = split_heads(w, self.shape.n_heads)  # (B, H, T, Dh)
        # as F.normalize, whose least norm is 1e-12
        squared_norm = (w * w).sum(-1, keepdim=True)
        unit_w = w * squared_norm.clamp(min=1e-24).rsqrt()
        # in 0 .. 2: with 2 it is a whole reflection
        beta = 2 * self.beta[layer.index](x).sigmoid().mT  # (B, H, T)
        return unit_w, beta

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        w, beta, *_ = layer.state
        w = part_of(w, layer.keys)
        beta = part_of(beta, layer.keys)
        before = layer.rows.start - layer.keys.start  # keys before the first query
        return logits + self.logit_scale * _logit_change(q, k, w, beta, before)


class PaTHFoX(PaTH):
    """PaTH with a forget gate (PaTH-FoX): each token reflects earlier keys and sets how
    fast they fade.

        logits_ij = (q_i · (H_i H_{i-1} ... H_{j+1}) k_j
                     + sum over t = j+1 .. i of ln f_t) / sqrt(d)

    Source: Yang et al. (2025), arXiv:2505.16381, as in fla's layer with its forget
    gate.
    Beyond training length: defined everywhere; far keys fade at a rate that the text
    sets.
    Checked against: fla naive_path_attn.
    """

    def __init__(
        self,
        shape: Shape,
        rank: Count = 32,
        silu: bool = True,
        start: Start = "normal",
        gate_bias: float = 0.0,
    ) -> None:
        super().__init__(shape, rank, silu, start)
        self.gate = nn.Parameter(
            torch.randn(shape.n_layers, shape.n_heads, shape.d_model) * 0.02
        )
        self.gate_bias = nn.Parameter(
            torch.full((shape.n_layers, shape.n_heads), gate_bias)
        )

    def prepare(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, ...]:
        w, beta = super().prepare(q, k, layer)
        x = self.given(layer.x, "reads its gates from")
        gates = F.linear(x, self.gate[layer.index], self.gate_bias[layer.index])
        log_f = F.logsigmoid(gates).mT.contiguous()  # (B, H, T)
        return w, beta, log_f.cumsum(-1)

    def bias(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        _, _, c = layer.state  # cumulative ln f, as in FoX
        return self.logit_scale * sums_after_keys(c, layer)


class GatedDelta(Encoding):
    """Gated delta rule (Gated DeltaNet), a recurrence in place of softmax: each token
    fades a state and writes its value at its key.

        S_t = a_t S_{t-1} (I - b_t k_t k_tᵀ) + b_t v_t k_tᵀ,   o_t = S_t q_t / sqrt(d)
        a_t = exp(-A softplus(w_h·x_t + c)),   b_t = sigmoid(u_h·x_t) per head

    The same by pairs, with PaTH's H_t = I - b_t k_t k_tᵀ, which is computed here:

        o_i = sum over j <= i of p_ij v_j,
        p_ij = a_i ... a_{j+1} b_j q_i·(H_i ... H_{j+1}) k_j / sqrt(d)

    Before it q, k and v pass a causal convolution and a SiLU, then q and k are divided
    by sqrt(|q|² + 1e-6), so that one as short as 0.001 stays shorter than 1. After it
    an output is divided by its rms, with 1e-5 under the root (Qwen3-Next: 1e-6), and
    gets a weight per channel, times silu(W x). `negative` doubles b.

    Source: Yang et al. (2024), arXiv:2412.06464; Grazzi et al. (2024), arXiv:2411.12537
    (negative); A and c start as in fla's layer, all else as in torch. Values are as
    wide as keys; fla's are twice as wide.
    Beyond training length: defined everywhere; the state keeps its size, and far tokens
    fade at a rate that the text sets.
    Checked against: transformers OLMo Hybrid's layer, by its recurrence step by step.
    """

    history = frozenset({"q", "x"})
    opening: Callable[[Tensor], Tensor] = staticmethod(F.silu)  # of the output's gate

    def __init__(self, shape: Shape, width: Count = 4, negative: bool = False) -> None:
        super().__init__(shape)
        self.negative = negative
        n = shape.n_layers
        inputs = shape.d_model
        heads = shape.n_heads
        self.decay = linears(n, inputs, heads)  # w
        self.beta = linears(n, inputs, heads)  # u
        self.gate = linears(n, inputs, heads * shape.head_dim)  # W
        self.kernels = kernels_of_heads(shape, "qkv", width)
        self.norm = nn.Parameter(torch.ones(n, shape.head_dim))

        rates = torch.empty(n, heads).uniform_(0.01, 16)  # its logarithm is finite
        self.A_log = nn.Parameter(rates.log())  # ln A
        self.dt_bias = _first_steps(n, heads)  # c

    def prepare(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        x = self.given(layer.x, "makes its gates from")
        b = self.beta[layer.index](x).sigmoid()
        if self.negative:
            b = 2 * b
        dt = F.softplus(self.decay[layer.index](x) + self.dt_bias[layer.index])
        log_a = -self.A_log[layer.index].exp() * dt
        return b.mT, log_a.cumsum(1).mT  # (B, H, T)

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        q = self._convolved("q", q, layer)
        k = self._convolved("k", k, layer)
        return unit(q), unit(k)

    def map_values(self, v: Tensor, layer: Layer) -> Tensor:
        return self._convolved("v", v, layer)

    def _convolved(self, name: str, a: Tensor, layer: Layer) -> Tensor:
        return F.silu(convolved_heads(a, self.kernels[name][layer.index]))

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        b, _ = layer.state
        before = layer.rows.start - layer.keys.start  # keys before the first query
        change = _logit_change(q, k, k, part_of(b, layer.keys), before)
        return logits + self.logit_scale * change

    def attend(self, logits: Tensor, v: Tensor, layer: Layer) -> Tensor:
        b, total = layer.state  # cumulative ln a
        sums = sums_after_keys(total, layer)
        factors = sums.clamp(max=0).exp() * b[:, :, None, layer.keys]
        weights = logits.masked_fill(~layer.visible, 0) * factors
        return weights @ v.to(weights.dtype)

    def map_outputs(self, out: Tensor, layer: Layer) -> Tensor:
        out = F.rms_norm(out, out.shape[-1:], self.norm[layer.index], 1e-5)
        x = self.given(layer.x, "makes its gates from")
        gates = self.opening(self.gate[layer.index](x))[:, layer.rows]
        return out * split_heads(gates, self.shape.n_heads)


def _first_steps(*size: int) -> nn.Parameter:
    """Return what softplus turns into numbers from 0.001 to 0.1."""
    log_dt = torch.empty(size).uniform_(math.log(0.001), math.log(0.1))
    return nn.Parameter(log_dt.exp().expm1().log())


class KDA(GatedDelta):
    """Kimi Delta Attention (KDA): the gated delta rule with a gate for each channel of
    the state.

        S_t = S_{t-1} diag(a_t) (I - b_t k_t k_tᵀ) + b_t v_t k_tᵀ,
        o_t = S_t q_t / sqrt(d)
        a_t = exp(-A softplus(W x_t + c)),   b_t = sigmoid(u_h·x_t) per head
        with `bound`   a_t = exp(-bound · sigmoid(A (W x_t + c)))

    The same by pairs, which is computed here: token t writes u_t at its key, less what
    stands there already. With P the cumulative ln a and f(q_i, k_j) the sum over
    channels n of q_in k_jn exp(P_in - P_jn),

        u_t = b_t (v_t - sum over s < t of f(k_t, k_s) u_s),
        o_t = sum over s <= t of f(q_t, k_s) u_s / sqrt(d)

    Convolutions and norms are those of `gated_delta`, with its 1e-6. An output is
    divided by its rms (a weight per channel), times sigmoid(V x). W and V have rank d.

    Source: Kimi Team, "Kimi Linear" (2025), arXiv:2510.26692, as transformers has it. A
    and c start as there, all else as in torch. `bound: 5` is the gate of Kimi K3
    (arXiv:2607.24653; its V has full rank) and GLM-5.3.
    Beyond training length: defined everywhere; the state keeps its size, and far tokens
    fade at rates that the text sets.
    Checked against: transformers Kimi Linear's layer, and GLM-5.3's for `bound`, by
    their recurrence step by step.
    """

    opening = staticmethod(torch.sigmoid)

    def __init__(
        self, shape: Shape, width: Count = 4, bound: Positive | None = None
    ) -> None:
        super().__init__(shape, width)
        self.bound = bound
        n = shape.n_layers
        content = shape.n_heads * shape.head_dim
        self.decay = low_rank(n, shape.d_model, shape.head_dim, content)  # W
        self.gate = low_rank(n, shape.d_model, shape.head_dim, content)  # V
        self.dt_bias = _first_steps(n, content)  # c
        rates = torch.ones(n, shape.n_heads)
        if bound is None:
            rates.uniform_(1, 16)
        self.A_log = nn.Parameter(rates.log())

    def prepare(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        x = self.given(layer.x, "makes its gates from")
        b = self.beta[layer.index](x).sigmoid()
        z = self.decay[layer.index](x) + self.dt_bias[layer.index]
        z = split_heads(z, self.shape.n_heads)  # (B, H, T, Dh)
        rates = self.A_log[layer.index].exp()[:, None, None]
        if self.bound is None:
            log_a = -rates * F.softplus(z)
        else:
            log_a = -self.bound * (rates * z).sigmoid()
        return b.mT, log_a.cumsum(2)

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        # o = F u and (I + B L) u = B v, where B is diag(b) and L is f(k_t, k_s) below
        # the diagonal. So v has the weights p B, where p (I + B L) = F.
        b, total = layer.state
        before = layer.rows.start - layer.keys.start  # keys before the first query
        products = _faded(logits, self.logit_scale * q, k, total, layer).tril(before)

        among_keys = _logits_among(k, k, part_of(total, layer.keys))
        coupling = part_of(b, layer.keys)[..., None] * among_keys
        # B L below the diagonal; the rest is not read
        return torch.linalg.solve_triangular(
            coupling, products, upper=False, left=False, unitriangular=True
        )

    def attend(self, logits: Tensor, v: Tensor, layer: Layer) -> Tensor:
        b, _ = layer.state
        weights = logits.masked_fill(~layer.visible, 0) * b[:, :, None, layer.keys]
        return weights @ v.to(weights.dtype)


def _logit_change(q: Tensor, k: Tensor, w: Tensor, beta: Tensor, before: int) -> Tensor:
    """Return what the reflections in between add to q·k, (B, H, Tq, Tk). Query r is
    token r + before, and sees the keys up to its own.

    One by one, it would be for t = i .. j+1: q' -= beta_t (q'·w_t) w_t, and then
    logit_ij = q'·k_j. But keys are taken in blocks, from the right. Of one block W and
    K are the rows w_t and k_t, L is stril(W Wᵀ) and B is diag(beta_t); Q' are the
    queries as the later blocks have left them. stril is tril without the diagonal.

    1. A query meets H_i first, then H_{i-1}, ...: H_t takes c_t w_t off it, where
       c_t = beta_t (q'·w_t - sum over s > t of c_s w_s·w_t).
    2. For all t at once: C = (S - C L) B, where S = Q' Wᵀ. So C (I + L B) = S B.
    3. (I + B L) B = B (I + L B), so B (I + L B)^-1 = (I + B L)^-1 B. Call it T: then
       C = S T.
    4. After the block the queries are Q' - C W = Q' - S V, where V = T W.
    5. Up to key j only tokens t > j count. So the logits are
       Q' Kᵀ - C stril(W Kᵀ) = Q' Kᵀ - S M, where M = T stril(W Kᵀ). Less Q Kᵀ, they
       are (Q' - Q) Kᵀ - S M.
    6. Tokens t after the query reflect nothing: tril makes S 0 there. T is lower
       triangular, so C is 0 there too.
    """
    keys, rows = k.shape[2], q.shape[2]
    # a smaller block makes slim products, a larger one multiplies more zeros above a
    # diagonal
    size = min(32, keys)
    missing = -keys % size
    if missing:  # tokens that reflect nothing fill the last block
        k = F.pad(k, (0, 0, 0, missing))
        w = F.pad(w, (0, 0, 0, missing))
        beta = F.pad(beta, (0, missing))
    k_blocks = _blocks(k, size)  # (B, H, blocks, size, Dh)
    w_blocks = _blocks(w, size)
    m, v = _reflections(k_blocks, w_blocks, _blocks(beta, size))

    q_change = torch.zeros_like(q)  # Q' - Q
    parts = []
    for block in reversed(range(k_blocks.shape[2])):
        start = block * size  # the block's first token
        # Queries from `first` on see one of these keys; those before get zeros.
        first = min(rows, max(0, start - before))
        rows_before = (0, 0, first, 0)

        seen_change = q_change[:, :, first:]
        s = (q[:, :, first:] + seen_change) @ w_blocks[:, :, block].mT
        s = s.tril(first + before - start)  # the query `first` is token first + before
        logit_change = seen_change @ k_blocks[:, :, block].mT - s @ m[:, :, block]
        parts.append(F.pad(logit_change, rows_before))
        q_change = q_change - F.pad(s @ v[:, :, block], rows_before)
    return torch.cat(parts[::-1], dim=-1)[..., :keys]


def _reflections(k: Tensor, w: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Return M (B, H, blocks, size, size) and V (B, H, blocks, size, Dh), for k and w
    (B, H, blocks, size, Dh) and beta without Dh.
    """
    # T = (I + B L)^-1 B, in two steps: X (I + B L) = I, then T = X B. Solving
    # (I + B L) X = I would take twice the time.
    unit = torch.eye(w.shape[-2], dtype=w.dtype, device=w.device)
    # B scales the rows. Below the diagonal it is B L; the rest is not read.
    coupling = beta[..., None] * (w @ w.mT)
    x = torch.linalg.solve_triangular(
        coupling, unit, upper=False, left=False, unitriangular=True
    )
    t = x * beta[..., None, :]  # B scales the columns
    m = t @ (w @ k.mT).tril(-1)
    return m, t @ w
