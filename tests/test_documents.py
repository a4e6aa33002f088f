"""`data.document_mask`: an update on documents that share sequences is the update on
each of them by itself.
"""

import itertools

import numpy as np
import pytest
import torch
from support import changed, encoded
from torch.testing import assert_close

from posbench.data.batches import Batch, TrainingBatches
from posbench.model.gpt import build
from posbench.training.step import Trainer, begin_update

VOCABULARY = 50
LENGTH = 16
SEPARATOR = 7
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(1)
    text = rng.integers(8, VOCABULARY, 2_000)
    text[rng.integers(0, len(text), 200)] = SEPARATOR
    return TrainingBatches(text, LENGTH, 8, 0, SEPARATOR).batch(3)


def documents(batch: Batch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return ids and labels (1, T) of each document in each row of a batch."""
    found = []
    for ids, labels in zip(batch.ids, batch.labels, strict=True):
        is_first = ids == SEPARATOR
        firsts = is_first.nonzero().flatten()
        borders = sorted({0, *firsts.tolist(), LENGTH})
        for first, end in itertools.pairwise(borders):
            document = (ids[None, first:end], labels[None, first:end])
            found.append(document)
    return found


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", ["rope", "learned", "canon", "temperature", "fox"])
@pytest.mark.parametrize("size", [1, 2])
def test_an_update_is_that_of_each_document_alone(tiny_config, batch, name, size):
    updates = {"accumulation": 2, "clip": 1e9}
    config = changed(encoded(tiny_config, name), training=updates)

    # processes, which share the rows and add their gradients
    loss = 0.0
    gradients = []
    for rank in range(size):
        model = build(config, VOCABULARY)
        trainer = Trainer(model, config, CPU, torch.float32)
        own_rows = batch.share(2, rank, size)
        outcome = begin_update(trainer, own_rows, 0, 0.0)
        loss += outcome.read()[0]
        gradients.append([weight.grad for weight in model.parameters()])

    alone = build(config, VOCABULARY)
    losses = []
    for ids, labels in documents(batch):
        share = labels.numel() / batch.labels.numel()
        part = alone(ids, labels) * share
        part.backward()
        losses.append(float(part.detach()))

    assert len(losses) > len(batch.ids)
    assert loss == pytest.approx(sum(losses), rel=1e-5)
    for weight, *parts in zip(alone.parameters(), *gradients, strict=True):
        gradient = sum(parts)
        assert_close(gradient, weight.grad, atol=2e-6, rtol=1e-4)
