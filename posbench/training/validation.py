"""A quick loss on validation data during training. The rows of a run's curve come from
`evaluation/`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from posbench import machine
from posbench.config.schema import Config
from posbench.data.batches import Batch
from posbench.data.tokens import TaskData, Tokens
from posbench.errors import UserError
from posbench.model import IGNORED
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
def validation_losses(
    trainer: Trainer, batches: list[Batch], answers: bool
) -> dict[str, float]:
    """Return `val/loss`, the mean in nats per token over a fixed part of the validation
    data, at the training length.

    With `answers`, for problems, also `val/accuracy`, the share of scored tokens that
    the model finds likeliest.
    """
    model: Any = trainer.model.eval()

    def numbers_of(own: Sequence[Batch]) -> list[Tensor]:
        on_device = []
        for on_host in own:
            batch = on_host.to(trainer.device)
            with machine.autocast(trainer.device, trainer.dtype):
                hidden: Tensor = model.hidden(batch.ids)
                nll: Tensor = model.loss(hidden, batch.labels, batch.n_scored)
            numbers = [nll]
            if answers:
                likeliest = model.logits(hidden.float()).argmax(-1)  # (B, T)
                is_correct = (likeliest == batch.labels) & (batch.labels != IGNORED)
                # below 2**24 a count is exact in fp32
                numbers.append(is_correct.sum().to(nll.dtype))
            on_device.append(torch.stack(numbers))
        # MPS has no fp64
        return [on_host.double() for on_host in machine.to_host(on_device)]

    numbers = torch.stack(trainer.world.map(numbers_of, batches))
    n_scored = [batch.n_scored for batch in batches]
    numbers[:, 0] *= torch.tensor(n_scored)  # means become sums
    sums = numbers.sum(0).tolist()

    n_tokens = sum(n_scored)
    values = {"val/loss": sums[0] / n_tokens}
    if answers:
        values["val/accuracy"] = sums[1] / n_tokens
    return values
