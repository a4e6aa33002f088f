"""The training loss, without a second copy of the logits, which are the largest tensor of a step."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED = -100  # a label that is not scored, as torch's cross-entropy has it

# Logits in fp32 held at once: what stays in cache on a CPU, what keeps an accelerator busy.
AT_ONCE = 2**18
AT_ONCE_ACCELERATOR = 2**26


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean negative log-likelihood in nats per token, computed in fp32 (fp64 for fp64 logits); of no token it is 0.

    Where a gradient is wanted it is written over the logits: nothing else may need them afterwards.

    Args:
        logits: (..., V), any float dtype.
        labels: (...), int64, none of them `IGNORED`: logits are for rows that are scored.
    """
    loss: Tensor = _CrossEntropy.apply(logits.flatten(0, -2), labels.flatten())  # type: ignore[no-untyped-call]
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        exact = torch.promote_types(logits.dtype, torch.float32)
        at_once = AT_ONCE if logits.device.type == "cpu" else AT_ONCE_ACCELERATOR
        rows, n_scored = max(1, at_once // logits.shape[-1]), max(1, len(labels))
        # In fp16 the share of one token of many vanishes: it is taken with the gradient, which carries the loss scale.
        share = 1.0 if logits.dtype == torch.float16 else 1 / n_scored
        total = torch.zeros((), dtype=exact, device=logits.device)
        for piece, label in zip(torch.split(logits.detach(), rows), torch.split(labels[:, None], rows), strict=True):
            values = piece.to(exact)
            probabilities = torch.softmax(values, -1)
            # log sum exp = the largest logit less the log of its probability: one pass fewer than computing it again.
            normaliser = values.amax(-1, keepdim=True) - probabilities.amax(-1, keepdim=True).log()
            total += (normaliser - values.gather(-1, label)).sum()
            if ctx.needs_input_grad[0]:
                probabilities.scatter_add_(-1, label, torch.full_like(normaliser, -1.0))
                piece.copy_(probabilities.mul_(share))
        ctx.save_for_backward(logits.detach())
        ctx.left = 1 / n_scored / share
        return total / n_scored

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (of_logits,) = ctx.saved_tensors
        if ctx.left != 1:
            gradient = gradient * ctx.left
        return of_logits.mul_(gradient), None  # in place: a second backward pass is refused
