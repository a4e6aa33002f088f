"""Contextual position encoding (CoPE): positions are counted in tokens that matter.

Each key opens a gate for the query; the position of key j is the number of open gates from j up to the query. Counts
are fractional, so the logit's bias interpolates between the learned vectors of the whole positions around it:

    g_ij = sigmoid(z_ij),  z_ij = q_i·k_j / sqrt(d)         p_ij = sum over t = j .. i of g_it, at most P - 1
    logits_ij = z_ij + (1 - w)·q_i·e[floor p_ij] + w·q_i·e[ceil p_ij],   w = p_ij - floor p_ij

A head can thus attend to the third last sentence, if it learns gates that open at full stops. The P vectors e start at
zero, are shared by the heads and separate per layer. Order is that of the tokens; position numbers are not used.

Source: Golovneva et al., "Contextual Position Encoding: Learning to Count What's Important" (2024), arXiv:2405.18719.
Beyond training length: defined everywhere; counts beyond P - 1 are held there.
Checked against: x-transformers CoPE.
"""

import torch
from torch import Tensor, nn

from posbench.encodings.base import Encoding, Rows, Shape
from posbench.kernels.on_cuda import fused_on_cuda


class CoPE(Encoding):
    def __init__(self, shape: Shape, max_position: int = 64) -> None:
        super().__init__(shape)
        self.expect(max_position >= 2, "max_position", max_position, "a whole number of at least 2")
        self.table = nn.Parameter(torch.zeros(shape.n_layers, max_position, shape.head_dim))

    def scores(self, logits: Tensor, rows: Rows) -> Tensor:
        with torch.autocast(logits.device.type, enabled=False):
            at_whole = rows.q.float() @ self.table[rows.layer].mT  # (B, H, Tq, P), q unscaled as in the paper
        return _by_count(logits, at_whole, rows.visible)


@fused_on_cuda
def _by_count(logits: Tensor, at_whole: Tensor, visible: Tensor) -> Tensor:
    """Logits (B, H, Tq, Tk) plus what the vectors of whole positions give each query, (B, H, Tq, P), at the counts."""
    gates = logits.sigmoid().masked_fill(~visible, 0)
    count = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=at_whole.shape[-1] - 1)
    below, above = count.floor(), count.ceil()
    part = count - below
    return logits + (1 - part) * at_whole.gather(-1, below.long()) + part * at_whole.gather(-1, above.long())
