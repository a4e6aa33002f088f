"""`data.document_mask`: an update on documents that share sequences is the update on
each of them by itself.
"""

import numpy as np
import pytest
import torch
from support import changed, encoded

from posbench.data.batches import TrainingBatches
from posbench.model.gpt import build
from posbench.training.step import Trainer, begin_update

V, T, SEPARATOR = 50, 16, 7


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", ["rope", "learned", "canon", "temperature", "fox"])
def test_an_update_is_that_of_each_document_alone(tiny_config, name):
    config = changed(
        encoded(tiny_config, name), training={"accumulation": 2, "clip": 1e9}
    )
    text = np.random.default_rng(1).integers(8, V, 2_000)
    text[np.random.default_rng(2).integers(0, len(text), 200)] = SEPARATOR
    batch = TrainingBatches(text, T, 8, 0, SEPARATOR).batch(3)

    alone = build(config, V)
    losses = []
    for ids, labels in zip(batch.ids, batch.labels, strict=True):
        firsts = sorted({0, *(ids == SEPARATOR).nonzero()[:, 0].tolist()})
        for first, end in zip(firsts, [*firsts[1:], T], strict=True):
            losses.append(
                alone(ids[None, first:end], labels[None, first:end])
                * (end - first)
                / batch.labels.numel()
            )
    torch.stack(losses).sum().backward()

    for size in (1, 2):  # processes, which share the rows and add their gradients
        trainers = [
            Trainer(build(config, V), config, torch.device("cpu"), torch.float32)
            for _ in range(size)
        ]
        shares = [batch.share(2, rank, size) for rank in range(size)]
        of_each = [
            begin_update(*pair, 0, 0.0).read()[0]
            for pair in zip(trainers, shares, strict=True)
        ]
        assert len(losses) > len(batch.ids)
        assert sum(of_each) == pytest.approx(float(sum(losses).detach()), rel=1e-5)
        for wanted, *parts in zip(
            alone.parameters(),
            *(each.model.parameters() for each in trainers),
            strict=True,
        ):
            torch.testing.assert_close(
                sum(part.grad for part in parts), wanted.grad, atol=2e-6, rtol=1e-4
            )
