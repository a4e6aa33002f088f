"""Contextual position encoding (CoPE): positions count only the tokens that matter.

Each pair of query and key has a gate in 0 .. 1. The position of key j is the sum of the gates from j up to the query.
It is fractional, so the logit's bias interpolates between the learned vectors of the two nearest whole positions:

    g_ij = sigmoid(z_ij),  z_ij = q_i·k_j / sqrt(d)         p_ij = sum over t = j .. i of g_it, at most P - 1
    logits_ij = z_ij + (1 - w)·q_i·e[floor p_ij] + w·q_i·e[ceil p_ij],   w = p_ij - floor p_ij

A head can thus attend to the third last sentence, if it learns gates that open at full stops. The P vectors e start at
zero, are shared by the heads and separate per layer. Order is that of the tokens; position numbers are not used.

Source: Golovneva et al., "Contextual Position Encoding: Learning to Count What's Important" (2024), arXiv:2405.18719.
Beyond training length: defined everywhere; counts beyond P - 1 are held there.
Checked against: x-transformers CoPE.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from posbench.encodings.base import Encoding, Rows, Shape
from posbench.kernels.fused import fused_on_cuda


class CoPE(Encoding):
    def __init__(self, shape: Shape, max_position: int = 64) -> None:
        super().__init__(shape)
        self.expect(max_position >= 2, "max_position", max_position, "a whole number of at least 2")
        self.table = nn.Parameter(torch.zeros(shape.n_layers, max_position, shape.head_dim))

    def scores(self, logits: Tensor, rows: Rows) -> Tensor:
        at_whole = rows.q @ self.table[rows.layer].to(rows.q.dtype).mT  # (B, H, Tq, P), q unscaled as in the paper
        visible = rows.visible.to(logits.dtype)
        by_count: Tensor = _ByCount.apply(logits, at_whole.to(logits.dtype), visible)  # type: ignore[no-untyped-call]
        return by_count


class _ByCount(torch.autograd.Function):
    """Logits (B, H, Tq, Tk) plus the biases of whole positions (B, H, Tq, P), interpolated at the counts.

    The backward pass keeps four numbers per pair; without it autograd would keep about a dozen.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, at_whole: Tensor, visible: Tensor) -> Tensor:
        ctx.positions = at_whole.shape[-1]
        biased, *kept = _counted(logits, at_whole, visible)
        ctx.save_for_backward(*kept)
        return biased

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return *_uncounted(gradient, ctx.positions, *ctx.saved_tensors), None


@fused_on_cuda
def _counted(logits: Tensor, at_whole: Tensor, visible: Tensor) -> tuple[Tensor, ...]:
    """The result; then per pair: the gate, the count rounded down, its fractional part, and the slope there."""
    gates = logits.sigmoid().mul(visible)
    count = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=at_whole.shape[-1] - 1)
    below, part = count.long().clamp(min=0), count.frac()  # NaN becomes a whole number below 0
    slope = F.pad(at_whole.diff(dim=-1), (0, 1)).gather(-1, below)  # none beyond the last
    return torch.addcmul(logits + at_whole.gather(-1, below), part, slope), gates, below, part, slope


@fused_on_cuda
def _uncounted(
    gradient: Tensor, positions: int, gates: Tensor, below: Tensor, part: Tensor, slope: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the logits and of the biases of whole positions."""
    # A gate counts for all keys up to its own.
    of_gates = (gradient * slope).cumsum(-1)
    of_logits = gradient + torch.ops.aten.sigmoid_backward(of_gates, gates)
    nothing = gradient.new_zeros(*gradient.shape[:-1], positions)
    of_slopes = nothing.scatter_add(-1, below, gradient * part)
    of_whole = nothing.scatter_add_(-1, below, gradient)
    of_whole[..., 1:] += of_slopes[..., :-1]
    of_whole[..., :-1] -= of_slopes[..., :-1]
    return of_logits, of_whole
