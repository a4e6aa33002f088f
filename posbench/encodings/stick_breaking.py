"""Stick-breaking attention: order comes from the normaliser itself.

In place of the softmax, each query owns a stick of length 1 and walks from the nearest key to the farthest. Every key
breaks a share sigmoid(z) off the rest. The final rest goes to the query's own value:

    A_ij = sigmoid(z_ij) · prod_{j < l < i} (1 - sigmoid(z_il)),        z_ij = q_i·k_j / sqrt(d)
    o_i = sum_{j < i} A_ij v_j + rest_i v_i,        rest_i = prod_{l < i} (1 - sigmoid(z_il)) = 1 - sum_{j < i} A_ij

The query's own key does not break the stick; with `attend_current` it does, before all others. With `remainder: false`
the rest is dropped, and the first row attends to nothing. Keys after the query never break the stick, even without a
mask. Order is that of the tokens; position numbers are not used.

rest_i v_i is added as in the authors' training code (IBM/dolomite-engine of December 2024, `sb_remainder`; its learned
vectors per head and norms of January 2025 are left out). The paper's equation ends with the sum.

Source: Tan et al., "Scaling Stick-Breaking Attention: An Efficient Implementation and In-depth Study" (2024),
arXiv:2410.17980, section 2.
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
        self.attend_current = attend_current
        self.remainder = remainder

    def attend(self, logits: Tensor, v: Tensor, layer: Layer) -> Tensor:
        assert isinstance(layer.keys, slice)  # always, for an encoding with `attend`
        own = layer.rows.start - layer.keys.start  # column of the first query's own key
        breaks = layer.visible & torch.ones_like(layer.visible).tril(own if self.attend_current else own - 1)
        hidden = torch.zeros_like(breaks, dtype=logits.dtype).masked_fill_(~breaks, -math.inf)
        # In logarithms: log beta = z - softplus(z), log(1 - beta) = -softplus(z).
        z = logits + hidden
        taken = F.softplus(z).flip(-1).cumsum(-1).flip(-1)  # of the key and of all keys between it and the query
        out = (z - taken).exp() @ v.to(z.dtype)
        rest = (-taken[..., :1]).exp()
        return out + rest * v[:, :, own : own + out.shape[2]] if self.remainder else out
