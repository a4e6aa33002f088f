"""Wall attention: forget gates for every channel.

Where FoX lowers a key's logit by one gate per head and token, each channel of q·k fades here at a rate of its own:

    f_t = sigmoid(W x_t + b), a number per channel,    P = cumulative sum of ln f
    logits_ij = sum over channels n of q_in k_jn exp(P_in - P_jn) / sqrt(d)

A channel whose gates stay open keeps what was far away, one that closes sees near keys only. Faded, a logit goes to 0
and not to minus infinity. Order is that of the tokens; position numbers are not used. Without a mask, a key after the
query is as it is.

q exp(P) and k exp(-P) would overflow after some hundred tokens, so that keys are taken by blocks: exp(P_i - P_m) and
exp(P_m - P_j), with m the block's last key, are at most 1. Pairs within a block are computed one by one.

Source: fla's layer and plain form (contributed by Tilde Research, 2026; no paper was found), without its optional gate
per head and its output gate. Gates start with b = 8, open.
Beyond training length: defined everywhere; like FoX it fades, at rates that the text chooses.
Checked against: fla naive_wall_attn.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings.base import Encoding, Rows, Shape
from posbench.errors import UserError

KEYS_PER_BLOCK = 32


class Wall(Encoding):
    def __init__(self, shape: Shape, gate_bias: float = 8.0) -> None:
        super().__init__(shape)
        self.expect(math.isfinite(gate_bias), "gate_bias", gate_bias, "a finite number")
        size = (shape.n_layers, shape.n_heads * shape.head_dim)
        self.weight = nn.Parameter(torch.randn(*size, shape.d_model) * 0.02)
        self.gate_bias = nn.Parameter(torch.full(size, gate_bias))

    def prepare(self, q: Tensor, k: Tensor, x: Tensor | None, positions: Tensor, layer: int) -> tuple[Tensor, ...]:
        """Running sums of the log gates (B, H, T, Dh), fp32."""
        if x is None:
            raise UserError(f"'{self.name}' reads its gates from the layer's input: pass x")
        with torch.autocast(x.device.type, enabled=False):
            kept = F.logsigmoid(F.linear(x.float(), self.weight[layer], self.gate_bias[layer]))
            return (kept.cumsum(1).view(*x.shape[:2], self.shape.n_heads, -1).transpose(1, 2),)

    def scores(self, logits: Tensor, rows: Rows) -> Tensor:
        assert isinstance(rows.keys, slice)  # as it is for who has `scores`
        (total,) = rows.state
        own = rows.queries.start - rows.keys.start  # column of the first query's own key
        with torch.autocast(logits.device.type, enabled=False):
            q, k = self.logit_scale * rows.q.float(), rows.k.float()
            of_q, of_k = total[:, :, rows.queries], total[:, :, rows.keys]
            parts = []
            for start in range(0, k.shape[2], KEYS_PER_BLOCK):
                block = slice(start, start + KEYS_PER_BLOCK)
                kb, pb = k[:, :, block], of_k[:, :, block]
                # Queries before the block, within it, and from its last key on.
                cuts = [max(0, start - own), max(0, start + kb.shape[2] - 1 - own)]
                _, q_in, q_on = q.tensor_split(cuts, dim=2)
                before, p_in, p_on = of_q.tensor_split(cuts, dim=2)
                faded = (p_in[:, :, :, None] - pb[:, :, None]).clamp(max=0).exp()
                within = (q_in[:, :, :, None] * kb[:, :, None] * faded).sum(-1)
                last = pb[:, :, -1:].detach()  # what it is changes nothing
                after = (q_on * (p_on - last).exp()) @ (kb * (last - pb).exp()).mT
                parts.append(torch.cat((logits[:, :, : before.shape[2], block], within, after), dim=2))
            return torch.cat(parts, dim=-1)
