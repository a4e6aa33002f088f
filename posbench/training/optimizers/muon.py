"""Muon for the matrices of the blocks, AdamW for all else.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024),
https://kellerjordan.github.io/posts/muon; the size of an update is of Liu et al.,
"Muon is Scalable for LLM Training" (2025), arXiv:2502.16982, section 2.2.
"""

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from posbench import machine
from posbench.config.schema import TrainingConfig
from posbench.training.optimizers.adamw import AdamW

# of the odd polynomial that brings singular values near 1: Jordan et al. (2024)
A, B, C = 3.4445, -4.7750, 2.0315
ITERATIONS = 5
SMALLEST_NORM = 1e-7


class Muon(AdamW):
    """Moves a matrix by the nearest orthogonal one to its mean gradient, at
    `training.muon_ratio` times the learning rate; all else as AdamW does.

    Parts of one shape are one tensor, so that a device has few kernels to launch.
    """

    def __init__(self, groups: list[dict[str, Any]], training: TrainingConfig) -> None:
        for group in groups:
            if "parts" in group:
                group["times"] = training.muon_ratio
        super().__init__(groups, training)
        self.momentum = training.momentum
        self.precision = training.precision

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        groups = self.param_groups
        self.param_groups = [group for group in groups if "parts" not in group]
        super().step()
        self.param_groups = groups
        for group in groups:
            if "parts" in group:
                self._step_matrices(group)

    def _step_matrices(self, group: dict[str, Any]) -> None:
        """Move each part of the group's matrices."""
        stacks = defaultdict(list)  # by shape: (weight, gradient) of each part
        for weight, rows in zip(group["params"], group["parts"], strict=True):
            if weight.grad is not None:
                parts = zip(weight.split(rows), weight.grad.split(rows), strict=True)
                for part, gradient in parts:
                    stacks[part.shape].append((part, gradient))

        rate, decay = group["lr"], group["weight_decay"]
        for shape, stack in stacks.items():
            weights, gradients = zip(*stack, strict=True)
            state = self.state[group["params"][0]]
            update = self._update(state, torch.stack(gradients))
            # 1 after an update that was not finite
            failed = getattr(self, "found_inf", None)
            if failed is None:
                failed = update.new_zeros(())
            size = 0.2 * math.sqrt(
                max(shape)
            )  # AdamW's updates have about 0.2 a number
            finite = 1 - failed
            update = torch.where(failed > 0, 0.0, update * (rate * size))
            torch._foreach_mul_(weights, 1 - finite * (rate * decay))
            torch._foreach_sub_(weights, update.unbind())

    def _update(self, state: dict[str, Tensor], gradient: Tensor) -> Tensor:
        """Return the update (n, rows, columns) for gradients of that shape."""
        name = f"momentum {tuple(gradient.shape[1:])}"
        if name not in state:
            state[name] = torch.zeros_like(gradient)
        mean = state[name]
        failed = getattr(self, "found_inf", None)
        new = mean.lerp(gradient, 1 - self.momentum)
        if failed is not None:
            new = torch.where(failed > 0, mean, new)
        mean.copy_(new)
        update = gradient.lerp(mean, self.momentum)  # Nesterov's momentum
        dtype = machine.resolve_precision(self.precision, gradient.device)
        return orthogonal(update.to(dtype)).to(gradient.dtype)


def orthogonal(matrices: Tensor) -> Tensor:
    """Return (n, rows, columns) with all singular values brought near 1, by five
    Newton-Schulz iterations.
    """
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        factor = torch.baddbmm(gram, gram, gram, beta=B, alpha=C)
        x = torch.baddbmm(x, factor, x, beta=A)
    if is_tall:
        x = x.mT
    return x.contiguous()
