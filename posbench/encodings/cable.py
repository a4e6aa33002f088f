"""Context-aware biases (CABLE): every token adds to the distance between what stands before and after it.

Each token has a length per head, computed from the layer's input. A key's logit falls by the lengths of all tokens
after the key, up to and including the query:

    logits_ij = q_i·k_j / sqrt(d) - sum over t = j+1 .. i of softplus(w_h·x_t + b_h)

That is forgetting attention (`fox`) with the signs of w and b turned: softplus(z) = -ln sigmoid(-z). With w = 0 this is
ALiBi with slope softplus(b). Order is that of the tokens; position numbers are not used. The authors' code leaves out
the 1/sqrt(d); here it stays, as for every encoding.

Source: Veisi et al., "Context-aware Biases for Length Extrapolation" (2025), arXiv:2503.08067, as the authors' code has
it (axiomlab/Cable).
Beyond training length: defined everywhere; like ALiBi it fades, at a rate that the text chooses.
Checked against: plain loops, and fla-core naive_forgetting_attn with turned signs.
"""

import torch.nn.functional as F
from torch import Tensor

from posbench.encodings.fox import FoX


class CABLE(FoX):
    def kept(self, gates: Tensor) -> Tensor:
        return -F.softplus(gates)
