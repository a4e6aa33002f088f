"""Stick-breaking attention: order from the normaliser itself.

In place of the softmax, each query owns a stick of length 1 and walks from the nearest key to the farthest. Every key
breaks a share sigmoid(z) off what is left, so nearer keys come first without any code for position:

    A_ij = sigmoid(z_ij) · prod_{j < l < i} (1 - sigmoid(z_il)),        z_ij = q_i·k_j / sqrt(d)

The current token is left out (`attend_current` takes it in, the first to break), so the first row attends to nothing.
Weights sum to 1 - rest_i. The equation stops there; its authors' tests and benchmarks then give the rest to the query's
own value, o_i += rest_i v_i: option `remainder`. Keys after the query never break the stick, mask or not. Positions as
numbers play no part.

Source: Tan et al., "Scaling Stick-Breaking Attention: An Efficient Implementation and In-depth Study" (2024),
arXiv:2410.17980, section 2.
Beyond training length: defined everywhere; far keys share what the near ones left, so little changes with length.
Checked against: fla naive_stickbreaking_attn.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from posbench.encodings.base import Encoding, Rows, Shape


class StickBreaking(Encoding):
    def __init__(self, shape: Shape, attend_current: bool = False, remainder: bool = False) -> None:
        super().__init__(shape)
        self.attend_current = attend_current
        self.remainder = remainder

    def attend(self, logits: Tensor, rows: Rows) -> Tensor:
        own = rows.queries.start - rows.keys.start  # column of the first query's own key
        breaks = rows.visible & torch.ones_like(rows.visible).tril(own if self.attend_current else own - 1)
        z = logits.float().masked_fill(~breaks, 0)
        # In logarithms: what each key leaves of the stick, summed over the keys between it and the query.
        leaves = F.logsigmoid(-z).masked_fill(~breaks, 0)
        left = leaves.flip(-1).cumsum(-1).flip(-1) - leaves
        weights = (F.logsigmoid(z) + left).exp().masked_fill(~breaks, 0)
        out = weights @ rows.v.to(weights.dtype)
        if self.remainder:
            out = out + leaves.sum(-1, keepdim=True).exp() * rows.v[:, :, own : own + out.shape[2]]
        return out
