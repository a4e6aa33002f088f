"""Wall attention: forget gates for every channel.

    f_t = sigmoid(W x_t + b), a number per channel,    P = cumulative sum of ln f
    logits_ij = sum over channels n of q_in k_jn exp(P_in - P_jn) / sqrt(d)

A faded logit goes to 0, not to minus infinity. Gates start with b = 8, open. Order is that of the tokens.

Source: fla's layer and plain form (contributed by Tilde Research, 2026; no paper), without its optional gate per head
and its output gate.
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
    length, size = q.shape[2], PAIRED
    short = max(size, 1 << (length - 1).bit_length()) - length
    q, k = (F.pad(x, (0, 0, 0, short)) for x in (q, k))
    total = torch.cat((total, total[:, :, -1:].expand(-1, -1, short, -1)), dim=2)
    q_in, k_in, of = (x.view(*x.shape[:2], -1, size, x.shape[3]) for x in (q, k, total))  # (B, H, blocks, size, Dh)
    faded = (of[..., :, None, :] - of[..., None, :, :]).clamp(max=0).exp()
    logits = (q_in[..., :, None, :] * k_in[..., None, :, :] * faded).sum(-1)
    while logits.shape[2] > 1:  # joins blocks in twos
        (_, query), (key, _), (before, later) = (
            x.view(*x.shape[:2], -1, 2, size, x.shape[3]).unbind(3) for x in (q, k, total)
        )
        above = F.pad(logits[:, :, ::2], (0, size))
        below = torch.cat((_across(query, later, key, before), logits[:, :, 1::2]), dim=-1)
        logits, size = torch.cat((above, below), dim=-2), 2 * size
    return logits[:, :, 0, :length, :length]
