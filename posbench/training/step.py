"""One update of the weights: learning rate, optimizer, gradients."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from posbench import machine
from posbench.config.schema import Config, TrainingConfig
from posbench.data.batches import Batch
from posbench.errors import RunFailed
from posbench.kernels.fused import fusing
from posbench.randomness import generator


def learning_rate(step: int, total: int, training: TrainingConfig) -> float:
    """The learning rate of update `step` (from 0) of `total`: a pure function, so resuming cannot lose it.

    Linear warm-up, then a cosine down to `final_learning_rate` x peak; or a constant whose last `decay_fraction`
    falls linearly to it.
    """
    warmup = training.warmup_tokens // training.tokens_per_step
    if step < warmup:
        return training.learning_rate * (step + 1) / warmup
    final = training.final_learning_rate
    if training.schedule == "cosine":
        progress = (step - warmup) / max(1, total - 1 - warmup)
        share = final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    else:
        left = (total - step) / max(1.0, training.decay_fraction * total)
        share = final + (1 - final) * min(1.0, left)
    return training.learning_rate * share


def optimizer_for(model: nn.Module, training: TrainingConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on the model's matrices only: never on norms, nor on an encoding's parameters."""
    matrices = [p for name, p in model.named_parameters() if p.dim() >= 2 and not name.startswith("encoding.")]
    others = [p for name, p in model.named_parameters() if p.dim() < 2 or name.startswith("encoding.")]
    groups = [
        {"params": matrices, "weight_decay": training.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=training.learning_rate, betas=training.betas, fused=True
    )


@dataclasses.dataclass(frozen=True)
class Learner:
    """A model and all else that its updates have in common."""

    model: nn.Module
    forward: Callable[..., Tensor]  # the model or what wraps it: compiled, data-parallel; called as `GPT.forward`
    optimizer: torch.optim.Optimizer
    device: torch.device
    dtype: torch.dtype  # of matrix products
    accumulation: int  # parts of a batch that are computed one after the other
    clip: float  # largest gradient norm
    seed: int  # of random positions


def learner_for(model: nn.Module, config: Config, device: torch.device, dtype: torch.dtype) -> Learner:
    """What trains a model, which is on its device already, as the configuration says."""
    training = config.training
    return Learner(
        model=model,
        forward=_fused(model) if config.runtime.compile else model,
        optimizer=optimizer_for(model, training),
        device=device,
        dtype=dtype,
        accumulation=training.accumulation,
        clip=training.clip,
        seed=config.seed,
    )


def _fused(model: nn.Module) -> Callable[..., Tensor]:
    """The model, what lies between its kernels compiled."""

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        with fusing():
            return model(*args, **kwargs)  # type: ignore[no-any-return]

    return forward


def update(learner: Learner, batch: Batch, step: int, rate: float) -> tuple[float, float]:
    """One optimizer step; returns the mean loss in nats per scored token and the gradient norm before clipping.

    Each part of the batch counts by its share of the scored tokens, so that accumulation changes memory alone.

    Args:
        step: number of the update, from 0; random positions are drawn from it.
        rate: the learning rate.

    Raises:
        RunFailed: the loss or the gradient is not finite. The weights are then as they were before the step.
        ValueError: no label of the batch is scored.
    """
    if not batch.n_scored:
        raise ValueError(f"the batch of step {step + 1} has no label that is scored")
    parts = [part.to(learner.device) for part in batch.parts(learner.accumulation)]
    draw = generator(learner.seed, "positions", step, device=learner.device)
    total = torch.zeros((), device=learner.device)
    learner.optimizer.zero_grad(set_to_none=True)
    for part in parts:
        # So many such parts would make the batch. Divided by, for that is exact where parts are equal; a share is not.
        times = batch.n_scored / part.n_scored if part.n_scored else math.inf
        with machine.autocast(learner.device, learner.dtype):
            loss = learner.forward(part.ids, part.labels, n_scored=part.n_scored, generator=draw) / times
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(learner.model.parameters(), learner.clip)
    value, size = float(total), float(norm)
    for what, number in (("loss", value), ("gradient norm", size)):
        if not math.isfinite(number):
            raise RunFailed(
                f"{what} is {number} at step {step + 1} (learning rate {rate:.3g}): "
                "stopped before the update; a lower training.learning_rate usually helps",
                reason="diverged",
            )
    for group in learner.optimizer.param_groups:
        group["lr"] = rate
    learner.optimizer.step()
    return value, size
