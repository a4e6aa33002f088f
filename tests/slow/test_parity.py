"""Training by the fast kernels against training by attention's definition: the same
losses, step after step.
"""

import pytest
import torch

from posbench.config import compose
from posbench.data import tokens
from posbench.data.batches import TrainingBatches
from posbench.model.gpt import build
from posbench.model.standalone import attention_output
from posbench.training.step import Trainer, begin_update, learning_rate

pytestmark = pytest.mark.slow

STEPS, LENGTH, BATCH = 80, 256, 4
CPU = torch.device("cpu")


def losses(encoding: str, dtype: torch.dtype) -> torch.Tensor:
    """Return the loss of every step on the built-in corpus: (STEPS,)."""
    size = [
        f"training.train_length={LENGTH}",
        f"training.batch_size={BATCH}",
        "model.d_model=64",
        "model.n_layers=2",
    ]
    config = compose.single(
        [f"encoding={encoding}", *size, "evaluation.targets=1", "runtime.device=cpu"]
    )
    corpus = tokens.prepare(config.data, config.runtime.cache)
    trainer = Trainer(
        build(config, corpus.tokenizer.vocab_size, corpus.tokenizer.texts),
        config,
        CPU,
        dtype,
    )
    batches = TrainingBatches(corpus.train.ids, LENGTH, BATCH, config.seed)
    rates = [learning_rate(step, STEPS, config.training) for step in range(STEPS)]
    return torch.tensor(
        [
            begin_update(trainer, batches.batch(step), step, rate).read()[0]
            for step, rate in enumerate(rates)
        ]
    )


def by_definition(encoding, q, k, v, layer, last=None):
    assert last is None
    return attention_output(encoding, q, k, v, layer.x, layer.index, layer.positions)


def test_training_loses_what_it_loses_by_definition(monkeypatch):
    fast = losses("t5", torch.float32)
    half = losses("t5", torch.bfloat16)
    monkeypatch.setattr("posbench.model.gpt.attention", by_definition)
    exact = losses("t5", torch.float32)
    assert exact[-1] < exact[0] - 1  # it did learn
    torch.testing.assert_close(fast, exact, atol=1e-4, rtol=0)
    torch.testing.assert_close(half, exact, atol=0.02, rtol=0)  # any one step, in nats
    # Which way rounding takes a training is chance: by seeds the means of all steps are
    # 0.0008 apart (rms).
    torch.testing.assert_close(half.mean(), exact.mean(), atol=3e-3, rtol=0)
