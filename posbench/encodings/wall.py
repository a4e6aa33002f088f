"""Wall attention: forget gates for every channel.

FoX lowers a key's logit by one gate per head and token. Here each channel of q·k fades at its own rate:

    f_t = sigmoid(W x_t + b), a number per channel,    P = cumulative sum of ln f
    logits_ij = sum over channels n of q_in k_jn exp(P_in - P_jn) / sqrt(d)

A faded logit goes to 0, not to minus infinity. Order is that of the tokens; position numbers are not used. Without a
mask, keys after the query do not fade.

Source: fla's layer and plain form (contributed by Tilde Research, 2026; no paper was logits), without its optional gate
per head and its output gate. Gates start with b = 8, open.
Beyond training length: defined everywhere; like FoX it fades, at rates that the text chooses.
Checked against: fla naive_wall_attn.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings.base import Encoding, Layer, Shape

PAIRED = 4  # tokens whose pairs are computed one by one, a power of two


class Wall(Encoding):
    history = frozenset({"x"})

    def __init__(self, shape: Shape, gate_bias: float = 8.0) -> None:
        super().__init__(shape)
        size = (shape.n_layers, shape.n_heads * shape.head_dim)
        self.weight = nn.Parameter(torch.randn(*size, shape.d_model) * 0.02)
        self.gate_bias = nn.Parameter(torch.full(size, gate_bias))

    def prepare(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        """Return the sums of the log gates, (B, H, T, Dh)."""
        x = self.given(layer.x, "reads its gates from")
        gates = F.linear(x, self.weight[layer.index], self.gate_bias[layer.index])
        return F.logsigmoid(gates).cumsum(1).view(*gates.shape[:2], self.shape.n_heads, -1).transpose(1, 2)

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        # q exp(P) and k exp(-P) would overflow after some hundred tokens. If m is the last of some keys, exp(P_m - P_j)
        # and, for later queries, exp(P_i - P_m) are at most 1: one product serves a text's second half and its first.
        # Each half is split in the same way, down to a few tokens, whose pairs are computed one by one.
        assert isinstance(layer.keys, slice)  # always, for an encoding with `scores`
        of_q, of_k, q = layer.state[:, :, layer.rows], layer.state[:, :, layer.keys], self.logit_scale * q
        first, count = layer.rows.start - layer.keys.start, q.shape[2]  # column of the first query's own key
        before, own, after = logits.tensor_split((first, first + count), dim=-1)
        if first:
            before = _across(q, of_q, k[:, :, :first], of_k[:, :, :first])
        later = torch.ones(count, count, dtype=torch.bool, device=q.device).triu(1)
        faded = torch.where(later, own, _among(q, k[:, :, first : first + count], of_q))
        return torch.cat((before, faded, after), dim=-1)


def _across(q: Tensor, of_q: Tensor, k: Tensor, of_k: Tensor) -> Tensor:
    """Return logits (..., M, N) of queries (..., M, Dh) and keys (..., N, Dh) before them all, with their sums."""
    last = of_k[..., -1:, :].detach()  # its value cancels
    return (q * (of_q - last).exp()) @ (k * (last - of_k).exp()).mT


def _among(q: Tensor, k: Tensor, total: Tensor) -> Tensor:
    """Return logits (B, H, T, T) of the same tokens' queries and keys (B, H, T, Dh); valid for keys up to the query."""
    *outer, length, width = q.shape
    halvable = 1 << (length.bit_length() - 1)  # largest power of two up to the length
    if PAIRED < length != halvable:
        (q, q_rest), (k, k_rest), (total, rest) = (x.tensor_split((halvable,), dim=2) for x in (q, k, total))
        return _joined(_among(q, k, total), _across(q_rest, rest, k, total), _among(q_rest, k_rest, rest))
    size = min(PAIRED, length)
    q_in, k_in, of = (x.view(*outer, -1, size, width) for x in (q, k, total))  # in blocks of `size` tokens
    faded = (of[..., :, None, :] - of[..., None, :, :]).clamp(max=0).exp()
    logits = (q_in[..., :, None, :] * k_in[..., None, :, :] * faded).sum(-1)
    while size < length:  # joins blocks in twos
        halves = (x.view(*outer, -1, 2, size, width).unbind(3) for x in (q, k, total))
        (_, query), (key, _), (before, later) = halves
        logits = _joined(logits[:, :, ::2], _across(query, later, key, before), logits[:, :, 1::2])
        size *= 2
    return logits[:, :, 0]


def _joined(first: Tensor, across: Tensor, second: Tensor) -> Tensor:
    """Return a block of logits from those of its halves, and `across`: second queries, first keys."""
    above = F.pad(first, (0, second.shape[-1]))
    return torch.cat((above, torch.cat((across, second), dim=-1)), dim=-2)
