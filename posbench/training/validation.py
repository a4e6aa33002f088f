"""A quick loss on validation data during training. The evaluation of a run is
elsewhere.
"""

from typing import Any

import torch
from torch import Tensor

from posbench import machine
from posbench.config.schema import Config
from posbench.data.batches import Batch
from posbench.data.tokens import TaskData, Tokens
from posbench.errors import UserError
from posbench.model.loss import IGNORED
from posbench.training.step import Trainer


def validation_of(tokens: Tokens | TaskData, config: Config) -> list[Batch]:
    """Return the batches of validation; none if it is off, or if the text is too short
    and no cadence is set.
    """
    cadence = config.runtime.validate_every_steps
    if cadence == 0:
        return []
    try:
        return tokens.validation_batches(config.training)
    except UserError:
        if cadence is not None:
            raise
        return []


@torch.inference_mode()
def validate(trainer: Trainer, batches: list[Batch], answers: bool) -> dict[str, float]:
    """Return `val/loss`, the mean in nats per token over a fixed part of the validation
    data, at the training length.

    With `answers`, for problems, also `val/accuracy`, the share of scored tokens that
    the model finds likeliest.
    """
    trainer.model.eval()

    def sums_of(batch: Batch) -> Tensor:
        return _sums(trainer, batch.to(trainer.device), answers)

    sums = torch.stack(trainer.world.map(sums_of, batches)).sum(0).tolist()
    n_tokens = sum(batch.n_scored for batch in batches)
    values = {"val/loss": sums[0] / n_tokens}
    if answers:
        values["val/accuracy"] = sums[1] / n_tokens
    return values


def _sums(trainer: Trainer, batch: Batch, answers: bool) -> Tensor:
    """Return the sum of nll; with `answers` also the number of correct tokens."""
    model: Any = trainer.model
    with machine.autocast(trainer.device, trainer.dtype):
        nll: Tensor = model(batch.ids, batch.labels, n_scored=batch.n_scored)
        hidden = model.hidden(batch.ids) if answers else None
    total = nll.cpu().double() * batch.n_scored
    if hidden is None:
        return total.view(1)

    likeliest = model.logits(hidden.float()).argmax(-1)  # (B, T)
    is_correct = (likeliest == batch.labels) & (batch.labels != IGNORED)
    return torch.stack((total, is_correct.sum().cpu()))
