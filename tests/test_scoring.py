"""Scores of single tokens: against contexts put together one by one, and where less is
computed than everything.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support import encoded, nll_of

from posbench import machine
from posbench.config.schema import Config
from posbench.data.tokens import TokenSplit
from posbench.evaluation import protocols
from posbench.evaluation.protocols import targets_of
from posbench.evaluation.subjects import TrainedGPT, score
from posbench.model.gpt import GPT, build

V = 50
CPU = torch.device("cpu")
# fp32 sums of a few hundred terms through two layers, in another order. Nll is of the
# order of 4.
TOLERANCE = 2e-5


def model_of(tiny_config: Config, name: str = "rope", **options: Any) -> GPT:
    config = encoded(tiny_config, name, **options)
    model = build(config, V).eval()
    # some begin as zeros, which would hide what they do
    for parameter in model.encoding.parameters():
        torch.nn.init.normal_(parameter)
    return model


def text(n: int = 4000) -> TokenSplit:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, V, n).astype(np.uint16)
    starts = np.array([0, n], dtype=np.int64)
    return TokenSplit(ids=ids, starts=starts)


def subject_of(model: GPT) -> TrainedGPT:
    train_length = model.encoding.shape.train_length
    return TrainedGPT(model, train_length, CPU, torch.float32)


@pytest.mark.parametrize("protocol", ["fixed_target", "nonoverlap"])
def test_every_target_is_scored_after_the_context_that_its_window_holds(
    protocol, tiny_config
):
    model = model_of(tiny_config)
    split = text()
    planned = protocols.place_windows(protocol, split, [24], 8, 16, "concat")
    windows = planned[24]
    targets = targets_of(windows)
    ids = torch.from_numpy(split.ids.astype(np.int64))

    subject = subject_of(model)
    nll = score(subject, split, windows, 2048).ravel()

    for i in [*range(0, 24, 5), *range(30, len(nll), 7)]:
        at = targets.indices[i]
        context = ids[None, at - targets.context[i] : at]
        with torch.inference_mode():
            logits = model(context)[0, -1].double()
        expected = torch.logsumexp(logits, 0) - logits[ids[at]]
        assert nll[i] == pytest.approx(float(expected), abs=TOLERANCE)


def test_a_row_is_copied_to_the_host_once(tiny_config, monkeypatch):
    split = text()
    planned = protocols.place_windows("fixed_target", split, [24], 8, 16, "concat")
    windows = planned[24]
    subject = subject_of(model_of(tiny_config))
    copied: list[int] = []
    to_host = machine.to_host

    def counted(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        copied.append(len(tensors))
        return to_host(tensors)

    monkeypatch.setattr(machine, "to_host", counted)
    score(subject, split, windows, 4 * 24)

    n_batches = len(windows.starts) // 4
    assert copied == [n_batches]


def test_positions_are_drawn_by_seed_length_and_window(tiny_config, monkeypatch):
    model = model_of(tiny_config, "randomized")
    row = text(65).ids.astype(np.int64)
    ids = np.stack([row, row, row])
    seen: list[list[list[int]]] = []
    hidden = model.hidden

    def spied(inputs: torch.Tensor, positions: torch.Tensor, **more: Any) -> Any:
        seen.append(positions.tolist())
        return hidden(inputs, positions, **more)

    monkeypatch.setattr(model, "hidden", spied)
    subject = subject_of(model)
    with_another_seed = dataclasses.replace(subject, seed=1)
    shorter = ids[:, :33]
    nll_of(subject, ids, 8, 7)
    nll_of(with_another_seed, ids, 8, 7)
    nll_of(subject, shorter, 8, 7)
    nll_of(subject, ids, 8, 7)

    first, of_another_seed, of_another_length, again = seen
    assert again == first
    windows = [set(row) for row in first + of_another_seed + of_another_length]
    for window in windows:
        # all have an order of the same 256 numbers of their own
        alike = [other for other in windows if window <= other]
        assert alike == [window]
