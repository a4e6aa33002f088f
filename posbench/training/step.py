"""One update of the weights: learning rate, optimizer, gradients."""

import math
from typing import Any

import torch

from posbench import machine
from posbench.config.schema import Config, TrainingConfig
from posbench.data.batches import TrainingBatches
from posbench.errors import RunFailed
from posbench.model import GPT
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


def optimizer_for(model: GPT, training: TrainingConfig) -> torch.optim.AdamW:
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


def update(
    model: GPT,
    forward: Any,
    optimizer: torch.optim.Optimizer,
    rate: float,
    batches: TrainingBatches,
    config: Config,
    step: int,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[float, float]:
    """One optimizer step; returns the mean loss in nats per token and the gradient norm before clipping.

    Raises:
        RunFailed: the loss or the gradient is not finite. The weights are then as they were before the step.
    """
    parts = config.training.accumulation
    inputs, labels = (batch.to(device) for batch in batches.batch(step))
    draw = generator(config.seed, "positions", step, device=device)
    total = torch.zeros((), device=device)
    optimizer.zero_grad(set_to_none=True)
    for ids, targets in zip(inputs.chunk(parts), labels.chunk(parts), strict=True):
        with machine.autocast(device, dtype):
            loss = model.loss(forward(ids, None, draw), targets) / parts
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.clip)
    value, size = float(total), float(norm)
    for what, number in (("loss", value), ("gradient norm", size)):
        if not math.isfinite(number):
            raise RunFailed(
                f"{what} is {number} at step {step + 1} (learning rate {rate:.3g}): "
                "stopped before the update; a lower training.learning_rate usually helps",
                reason="diverged",
            )
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    return value, size
