"""Training by the fast kernels against training by attention's definition: the same
losses, step after step.
"""

import pytest
import torch

from posbench.data import tokens
from posbench.launch import compose
from posbench.machine import DTYPES
from posbench.model.gpt import build
from posbench.model.standalone import attention_output
from posbench.training.step import Trainer, begin_update, learning_rate

pytestmark = pytest.mark.slow

STEPS = 80
CPU = torch.device("cpu")
WORDS = [
    "encoding=t5",
    "training.train_length=256",
    "training.batch_size=4",
    "model.d_model=64",
    "model.n_layers=2",
    "evaluation.targets=1",
    "runtime.device=cpu",
]


def losses(precision: str) -> torch.Tensor:
    """Return the loss of every step on the built-in corpus: (STEPS,)."""
    config = compose.single([*WORDS, f"training.precision={precision}"])
    corpus = tokens.prepare(config.data, config.runtime.cache)
    tokenizer = corpus.tokenizer
    model = build(config, tokenizer.vocab_size, tokenizer.texts)
    trainer = Trainer(model, config, CPU, DTYPES[precision])
    batches = corpus.batches(config.training, config.seed)

    losses = []
    for step in range(STEPS):
        rate = learning_rate(step, STEPS, config.training)
        outcome = begin_update(trainer, batches.batch(step), step, rate)
        losses.append(outcome.read()[0])
    return torch.tensor(losses)


def by_definition(encoding, q, k, v, layer, last, compiles):
    assert last is None and not compiles
    return attention_output(encoding, q, k, v, layer.x, layer.index, layer.positions)


def test_training_loses_what_it_loses_by_definition(monkeypatch):
    fast = losses("fp32")
    half = losses("bf16")

    monkeypatch.setattr("posbench.model.gpt.attention", by_definition)
    exact = losses("fp32")

    assert exact[-1] < exact[0] - 1  # it did learn
    torch.testing.assert_close(fast, exact, atol=1e-4, rtol=0)
    torch.testing.assert_close(half, exact, atol=0.02, rtol=0)  # any one step, in nats
    # Which way rounding takes a training is chance: by seeds the means of all steps are
    # 0.0008 apart (rms).
    torch.testing.assert_close(half.mean(), exact.mean(), atol=3e-3, rtol=0)
