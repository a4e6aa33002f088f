"""The training loss from hidden states, without a second copy of the logits, the
largest tensors of a step.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from posbench.model.compiled import compiled

# logits computed at once: 1 GiB in bf16; fewer would mean more passes over the weight's
# gradient
HEAD_AT_ONCE = 2**29
AT_ONCE = 2**18  # logits in fp32 at once: as many as stay in a CPU's cache
AT_ONCE_ACCELERATOR = 2**26
COMPILED_FROM = 2**24  # from this many logits on CUDA, the loss is compiled
# the head's rows are padded to a multiple of this: tensor cores do not take an odd
# number
ALIGNED = 128


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return the mean negative log-likelihood in nats of labels (N,) under hidden (N,
    D) @ weight (V, D).T, 0 if N = 0.

    Products run in the dtype of autocast if that is on, the rest in fp32 (fp64 for fp64
    inputs). A label outside 0 .. V-1 raises IndexError or RuntimeError. The forward
    pass computes the gradients, too, block by block of rows: a block's logits are
    overwritten by their gradient. Liger Kernel does the same: Hsu et al. (2024),
    arXiv:2410.10989.
    """
    device_type = hidden.device.type
    dtype = hidden.dtype
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    # in `forward` it is off
    differentiate = torch.is_grad_enabled() and (
        hidden.requires_grad or weight.requires_grad
    )
    with torch.autocast(device_type, enabled=False):
        loss: Tensor = _LinearCrossEntropy.apply(
            hidden, weight, labels, dtype, differentiate
        )  # type: ignore[no-untyped-call]
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        dtype: torch.dtype,
        differentiate: bool,
    ) -> Tensor:
        vocabulary = len(weight)
        device = hidden.device
        exact = torch.promote_types(dtype, torch.float32)
        # The padding's rows, and so its logits, are 0: they add nothing to gradients.
        padding = 0 if device.type == "cpu" else -vocabulary % ALIGNED
        states = hidden.to(dtype)
        head = F.pad(weight.to(dtype), (0, 0, 0, padding))
        states_gradient = None
        head_gradient = None
        if differentiate:
            states_gradient = torch.empty_like(states)
            head_gradient = torch.zeros(head.shape, dtype=exact, device=device)
        total = torch.zeros((), dtype=exact, device=device)

        at_once = AT_ONCE if device.type == "cpu" else AT_ONCE_ACCELERATOR
        piece_rows = max(1, at_once // vocabulary)
        block_rows = max(1, HEAD_AT_ONCE // len(head))
        for start in range(0, len(states), block_rows):
            rows = slice(start, start + block_rows)
            logits = states[rows] @ head.mT
            loss_of = _loss
            compiles = device.type == "cuda" and not torch.compiler.is_compiling()
            if compiles and logits.numel() >= COMPILED_FROM:
                loss_of = _compiled_loss
            pieces = torch.split(logits[:, :vocabulary], piece_rows)
            their_labels = torch.split(labels[rows, None], piece_rows)
            for piece, label in zip(pieces, their_labels, strict=True):
                total += loss_of(piece, label, differentiate)
            # `loss_of` has written their gradient over the logits
            if states_gradient is not None and head_gradient is not None:
                logits_gradient = logits
                torch.mm(logits_gradient, head, out=states_gradient[rows])
                head_gradient += logits_gradient.mT @ states[rows]
        ctx.save_for_backward(states_gradient, head_gradient)
        ctx.vocabulary = vocabulary
        n_scored = max(1, len(labels))
        ctx.n_scored = n_scored
        ctx.dtypes = hidden.dtype, weight.dtype
        return total / n_scored

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        # of the sum over labels; `forward` has returned the mean
        states_gradient, head_gradient = ctx.saved_tensors
        factor = gradient / ctx.n_scored
        hidden_dtype, weight_dtype = ctx.dtypes
        hidden_gradient = states_gradient.to(hidden_dtype)
        weight_gradient = head_gradient[: ctx.vocabulary].to(weight_dtype)
        return hidden_gradient * factor, weight_gradient * factor, None, None, None


def _loss(logits: Tensor, labels: Tensor, differentiate: bool) -> Tensor:
    """Return the sum of the negative log-likelihoods of some rows, and write its
    gradient over the logits if wanted.
    """
    values = logits.to(torch.promote_types(logits.dtype, torch.float32))
    probabilities = torch.softmax(values, -1)
    # log sum exp = the largest logit minus the log of its probability: one pass fewer
    # than computing it again.
    largest = values.amax(-1, keepdim=True)
    normaliser = largest - probabilities.amax(-1, keepdim=True).log()
    nll = (normaliser - values.gather(-1, labels)).sum()
    if differentiate:
        minus_1 = torch.full_like(normaliser, -1.0)
        logits.copy_(probabilities.scatter_add_(-1, labels, minus_1))
    return nll


_compiled_loss = compiled(_loss, writes=True)
