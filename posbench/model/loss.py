"""The training loss piece by piece, without a second copy of the logits, which are the largest tensor of a step.

On CUDA it begins at the head, and the logits never exist whole.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from posbench.model.compiled import compiled

IGNORED = -100  # a label that is not scored, as torch's cross-entropy has it

# Logits in fp32 held at once: what stays in cache on a CPU, what keeps an accelerator busy.
AT_ONCE = 2**18
AT_ONCE_ACCELERATOR = 2**26
COMPILED_FROM = 2**24  # logits on CUDA
HEAD_AT_ONCE = 2**29  # logits of the head at once on CUDA: 1 GiB in bf16, few passes over the gradient of its weight
ALIGNED = 128  # rows of the head that tensor cores take at once; at an odd number they do not serve


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean negative log-likelihood in nats per token, computed in fp32 (fp64 for fp64 logits); of no token it is 0.

    Where a gradient is wanted it is written over the logits: nothing else may need them afterwards.

    Args:
        logits: (..., V), any float dtype.
        labels: (...), int64, none of them `IGNORED`: logits are for rows that are scored.

    Raises:
        IndexError, RuntimeError: a label that is none of 0 .. V-1.
    """
    logits, labels = logits.flatten(0, -2), labels.flatten()
    loss: Tensor = _CrossEntropy.apply(logits, labels)  # type: ignore[no-untyped-call]
    return loss


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """`cross_entropy` of hidden @ weight.T, in the dtype of autocast if that is on.

    Both products of the gradient are made while the logits of some rows exist. The gradient from above is multiplied
    into their small results, which needs no pass over the logits. The head is padded by rows of zeros, whose logits
    nothing reads, to a multiple of `ALIGNED`. The fused losses of Liger Kernel do the same: Hsu et al. (2024),
    arXiv:2410.10989, section 3.2.

    Args:
        hidden: (N, D).
        weight: (V, D).
        labels: (N,), int64, none of them `IGNORED`.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    differentiate = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)  # `forward` cannot know
    with torch.autocast(kind, enabled=False):
        loss: Tensor = _Linear.apply(hidden, weight, labels, dtype, differentiate)  # type: ignore[no-untyped-call]
    return loss


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, dtype: torch.dtype, differentiate: bool
    ) -> Tensor:
        vocabulary, exact = len(weight), torch.promote_types(dtype, torch.float32)
        read, head = hidden.to(dtype), F.pad(weight.to(dtype), (0, 0, 0, -vocabulary % ALIGNED))
        of_hidden = torch.empty_like(read) if differentiate else None
        of_head = torch.zeros(head.shape, dtype=exact, device=head.device) if differentiate else None
        total = torch.zeros((), dtype=exact, device=hidden.device)
        at_once, within = max(1, HEAD_AT_ONCE // len(head)), max(1, AT_ONCE_ACCELERATOR // vocabulary)
        for start in range(0, len(read), at_once):
            rows = slice(start, start + at_once)
            logits = read[rows] @ head.mT
            piece_by_piece = _fused_piece if _is_worth_compiling(logits) else _piece
            scored = torch.split(logits[:, :vocabulary], within), torch.split(labels[rows, None], within)
            for piece, label in zip(*scored, strict=True):
                total += piece_by_piece(piece, label, differentiate, None)
            if of_hidden is not None and of_head is not None:  # logits are their own gradient by now
                torch.mm(logits, head, out=of_hidden[rows])
                of_head += logits.mT @ read[rows]
        ctx.save_for_backward(of_hidden, of_head)
        n_scored = max(1, len(labels))
        ctx.vocabulary, ctx.n_scored, ctx.dtypes = vocabulary, n_scored, (hidden.dtype, weight.dtype)
        return total / n_scored

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        of_hidden, of_head = ctx.saved_tensors
        factor = gradient / ctx.n_scored
        of_hidden, of_weight = of_hidden.to(ctx.dtypes[0]), of_head[: ctx.vocabulary].to(ctx.dtypes[1])
        return of_hidden * factor, of_weight * factor, None, None, None


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        exact = torch.promote_types(logits.dtype, torch.float32)
        compiled = _is_worth_compiling(logits)
        at_once = AT_ONCE if logits.device.type == "cpu" else AT_ONCE_ACCELERATOR
        rows, n_scored = max(1, at_once // logits.shape[-1]), max(1, len(labels))
        # In fp16 the share of one token of many vanishes: it is taken with the gradient, which carries the loss scale.
        # So it is where pieces are compiled, for a number in them would be compiled, too.
        share = None if compiled or logits.dtype == torch.float16 else 1 / n_scored
        piece_by_piece = _fused_piece if compiled else _piece
        total = torch.zeros((), dtype=exact, device=logits.device)
        for piece, label in zip(torch.split(logits.detach(), rows), torch.split(labels[:, None], rows), strict=True):
            total += piece_by_piece(piece, label, ctx.needs_input_grad[0], share)
        ctx.save_for_backward(logits.detach())
        ctx.left = 1 / n_scored if share is None else None
        return total / n_scored

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (of_logits,) = ctx.saved_tensors
        return _times(gradient if ctx.left is None else gradient * ctx.left, of_logits), None


def _times(gradient: Tensor, of_logits: Tensor) -> Tensor:
    if gradient.device.type == "cpu" and gradient == 1:  # a pass over the largest tensor of a step for nothing
        return of_logits
    return of_logits.mul_(gradient)  # in place: a second backward pass is refused


def _piece(logits: Tensor, labels: Tensor, differentiate: bool, share: float | None) -> Tensor:
    """Sum of the negative log-likelihoods of some rows; their gradient, times `share`, is written over the logits."""
    values = logits.to(torch.promote_types(logits.dtype, torch.float32))
    probabilities = torch.softmax(values, -1)
    # log sum exp = the largest logit less the log of its probability: one pass fewer than computing it again.
    normaliser = values.amax(-1, keepdim=True) - probabilities.amax(-1, keepdim=True).log()
    nll = (normaliser - values.gather(-1, labels)).sum()
    if differentiate:
        probabilities.scatter_add_(-1, labels, torch.full_like(normaliser, -1.0))
        logits.copy_(probabilities if share is None else probabilities.mul_(share))
    return nll


_fused_piece = compiled(_piece)


def _is_worth_compiling(logits: Tensor) -> bool:
    """Compiled, the passes over the logits become fewer, for some seconds once."""
    return logits.device.type == "cuda" and logits.numel() >= COMPILED_FROM and not torch.compiler.is_compiling()
