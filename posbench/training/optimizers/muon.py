"""Muon for the matrices of the blocks, AdamW for all else.

Sources: Jordan et al., "Muon: An optimizer for hidden layers in neural networks"
(2024), https://kellerjordan.github.io/posts/muon; the size of an update is that of Liu
et al., "Muon is Scalable for LLM Training" (2025), arXiv:2502.16982, section 2.2.
`torch.optim.Muon` takes the same steps, but one matrix after the other.
"""

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from posbench import machine
from posbench.config.schema import TrainingConfig
from posbench.training.optimizers.adamw import AdamW

# Jordan et al. (2024): x (A + B x^2 + C x^4), five times, is near 1 for 0 < x <= 1
A, B, C = 3.4445, -4.7750, 2.0315
ITERATIONS = 5
SMALLEST_NORM = 1e-7


class Muon(AdamW):
    """Moves the parts of a block's matrices by their mean gradients, made orthogonal,
    at `training.muon_ratio` times the learning rate.
    """

    found_inf: Tensor | None = None  # 1 after an update that was not finite
    # AdamW's expects its own state of every weight
    __setstate__ = torch.optim.Optimizer.__setstate__

    def __init__(self, groups: list[dict[str, Any]], training: TrainingConfig) -> None:
        for group in groups:
            if "parts" in group:
                group["times"] = training.muon_ratio
        super().__init__(groups, training)
        self.momentum = training.momentum
        device = groups[0]["params"][0].device
        self.dtype = machine.resolve_precision(training.precision, device)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        groups = self.param_groups
        of_matrices = [group for group in groups if "parts" in group]
        self.param_groups = [group for group in groups if "parts" not in group]
        super().step()  # AdamW's
        self.param_groups = groups

        # All parts of a shape are one tensor: a device has few kernels to launch.
        for group in of_matrices:
            weights, gradients = defaultdict(list), defaultdict(list)  # by shape
            for weight, rows in zip(group["params"], group["parts"], strict=True):
                gradient = weight.grad
                if gradient is None:  # nothing reads it in this model
                    gradient = torch.zeros_like(weight)
                for part in weight.split(rows):
                    weights[part.shape].append(part)
                for part in gradient.split(rows):
                    gradients[part.shape].append(part)
            for shape in weights:
                self._move(weights[shape], torch.stack(gradients[shape]), group)

    def _move(
        self, weights: list[Tensor], gradients: Tensor, group: dict[str, Any]
    ) -> None:
        """Move matrices of one shape by their gradients, (n, rows, columns)."""
        rows, columns = weights[0].shape
        state = self.state[group["params"][0]]
        name = f"momentum {rows}x{columns}"
        if name not in state:
            state[name] = torch.zeros_like(gradients)
        momentum = state[name]

        is_finite = gradients.new_ones(())
        if self.found_inf is not None:
            is_finite -= self.found_inf
        # the momentum in the place of gradients leaves itself as it is
        gradients = torch.where(is_finite > 0, gradients, momentum)
        momentum.lerp_(gradients, 1 - self.momentum)
        gradients.lerp_(momentum, self.momentum)  # Nesterov's

        # A CPU is faster with one matrix at a time.
        n_at_once = 1 if gradients.device.type == "cpu" else len(gradients)
        updates: list[Tensor] = []
        for stack in torch.split(gradients, n_at_once):
            update = orthogonal(stack.to(self.dtype))
            updates.extend(update.to(stack.dtype).unbind())
        # With this factor they are as large as AdamW's: Liu et al. (2025), equation 4.
        size = 0.2 * math.sqrt(max(rows, columns))
        rate = is_finite * group["lr"]
        torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])
        torch._foreach_sub_(weights, torch._foreach_mul(updates, rate * size))


def orthogonal(stack: Tensor) -> Tensor:
    """Return matrices (n, rows, columns) with all singular values brought near 1, by
    the iteration of Newton and Schulz.
    """
    rows, columns = stack.shape[1:]
    if rows > columns:
        return orthogonal(stack.mT).mT.contiguous()
    norm = stack.norm(dim=(1, 2), keepdim=True).clamp(min=SMALLEST_NORM)
    x: Tensor = stack / norm
    if rows == columns or x.dtype == torch.bfloat16:
        for _ in range(ITERATIONS):
            x = _times(_factor(x @ x.mT), x)
        return x

    # The product of all factors of x follows from x x^T, which has fewer columns. In
    # bf16 its rounding would grow.
    gram = x @ x.mT
    factor = _factor(gram)
    product: Tensor = A * torch.eye(rows, device=x.device) + factor
    for _ in range(ITERATIONS - 1):
        gram = _times(factor, _times(factor, gram))
        factor = _factor(gram)
        product = _times(factor, product)
    return product @ x


def _factor(gram: Tensor) -> Tensor:
    return torch.baddbmm(gram, gram, gram, beta=B, alpha=C)


def _times(factor: Tensor, x: Tensor) -> Tensor:
    """Return (A + factor) x."""
    return torch.baddbmm(x, factor, x, beta=A)
