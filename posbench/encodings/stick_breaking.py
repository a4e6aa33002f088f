"""Stick-breaking attention: each key, from the nearest on, breaks a share sigmoid(z) off the rest of a stick.

    A_ij = sigmoid(z_ij) · prod_{j < l < i} (1 - sigmoid(z_il)),        z_ij = q_i·k_j / sqrt(d)
    o_i = sum_{j < i} A_ij v_j + rest_i v_i,        rest_i = prod_{l < i} (1 - sigmoid(z_il)) = 1 - sum_{j < i} A_ij

With `attend_current` the query's own key breaks the stick, too, before all others; with `remainder: false` the rest is
dropped. Keys after the query never break it. Order is that of the tokens; position numbers are not used.

Source: Tan et al., "Scaling Stick-Breaking Attention: An Efficient Implementation and In-depth Study" (2024),
arXiv:2410.17980, section 2; rest_i v_i as in the authors' code (IBM/dolomite-engine of December 2024, `sb_remainder`).
Beyond training length: defined everywhere; far keys share what the near ones left, so little changes with length.
Checked against: fla naive_stickbreaking_attn and a plain loop.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from posbench.encodings.base import Encoding, Layer, Shape


class StickBreaking(Encoding):
    name = "stick_breaking"

    def __init__(self, shape: Shape, attend_current: bool = False, remainder: bool = True) -> None:
        super().__init__(shape)
        self.attend_current, self.remainder = attend_current, remainder

    def attend(self, logits: Tensor, v: Tensor, layer: Layer) -> Tensor:
        assert isinstance(layer.keys, slice)
        own = layer.rows.start - layer.keys.start  # column of the first query's own key
        breaks = layer.visible & torch.ones_like(layer.visible).tril(own if self.attend_current else own - 1)
        hidden = torch.zeros_like(breaks, dtype=logits.dtype).masked_fill_(~breaks, -math.inf)
        # In logarithms: log beta = z - softplus(z), log(1 - beta) = -softplus(z).
        z = logits + hidden
        taken = F.softplus(z).flip(-1).cumsum(-1).flip(-1)  # of the key and of all keys between it and the query
        out = (z - taken).exp() @ v.to(z.dtype)
        rest = (-taken[..., :1]).exp()
        return out + rest * v[:, :, own : own + out.shape[2]] if self.remainder else out
