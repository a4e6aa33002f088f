"""Scores of single tokens: against contexts put together one by one, and where less is
computed than everything.
"""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from support import encoded

from posbench import encodings
from posbench.config.schema import Config
from posbench.data.tokens import TokenSplit
from posbench.evaluation import protocols
from posbench.evaluation.models import TrainedGPT, nll_of, score
from posbench.evaluation.protocols import targets_of
from posbench.model.gpt import GPT, Reading, build

V = 50
CPU = torch.device("cpu")
# fp32 sums of a few hundred terms through two layers, in another order. Nll is of the
# order of 4.
TOLERANCE = 2e-5


def model_of(tiny_config: Config, name: str = "rope", **options: Any) -> GPT:
    model = build(encoded(tiny_config, name, **options), V).eval()
    # some begin as zeros, which would hide what they do
    for parameter in model.encoding.parameters():
        torch.nn.init.normal_(parameter)
    return model


def text(n: int = 4000) -> TokenSplit:
    ids = np.random.default_rng(0).integers(0, V, n).astype(np.uint16)
    return TokenSplit(ids=ids, starts=np.array([0, n], dtype=np.int64))


def subject_of(model: GPT) -> TrainedGPT:
    return TrainedGPT(model, model.encoding.shape.train_length, CPU, torch.float32)


@pytest.mark.parametrize("protocol", ["fixed_target", "nonoverlap"])
def test_every_target_is_scored_after_the_context_that_its_window_holds(
    protocol, tiny_config
):
    model = model_of(tiny_config)
    split = text()
    windows = protocols.plan(protocol, split, [24], 8, 16, "concat")[24]
    targets = targets_of(windows)
    nll = score(subject_of(model), split, windows, 2048).ravel()
    ids = torch.from_numpy(split.ids.astype(np.int64))
    for i in [*range(0, 24, 5), *range(30, len(nll), 7)]:
        at = targets.indices[i]
        context = targets.context[i]
        with torch.inference_mode():
            logits = model(ids[None, at - context : at])[0, -1].double()
        assert nll[i] == pytest.approx(
            float(torch.logsumexp(logits, 0) - logits[ids[at]]), abs=TOLERANCE
        )


@pytest.mark.sample(16)
@pytest.mark.parametrize("name", encodings.names())
def test_the_last_rows_alone_are_the_last_rows_of_all(name, tiny_config):
    model = model_of(tiny_config, name)
    ids = torch.randint(
        V,
        (3, min(40, model.encoding.max_length or 40)),
        generator=torch.Generator().manual_seed(0),
    )
    positions = model.encoding.positions(ids, torch.Generator().manual_seed(0))
    positions = positions if "positions" in model.encoding.hooks else None
    with torch.inference_mode():
        for window, last in ((None, 7), (12, 1)):
            reading = Reading(window=window)
            alone = model.hidden(ids, positions, last=last, reading=reading)
            everything = model.hidden(ids, positions, reading=reading)
            # Normalised states are of the order of 1; learned parameters drawn from
            # N(0, 1) make large logits.
            torch.testing.assert_close(
                alone, everything[:, -last:], atol=1e-4, rtol=1e-4
            )


def test_positions_are_drawn_by_seed_length_and_window(tiny_config, monkeypatch):
    model = model_of(tiny_config, "randomized")
    ids = np.tile(text(65).ids.astype(np.int64), (3, 1))
    seen: list[np.ndarray] = []
    hidden = model.hidden

    def spied(
        inputs: torch.Tensor, positions: torch.Tensor, **more: Any
    ) -> torch.Tensor:
        seen.append(positions.numpy())
        return hidden(inputs, positions, **more)

    monkeypatch.setattr(model, "hidden", spied)
    subject = subject_of(model)
    for each, length in (
        (subject, 64),
        (dataclasses.replace(subject, seed=1), 64),
        (subject, 32),
        (subject, 64),
    ):
        nll_of(each, ids[:, : length + 1], 8, 7)
    draws = [row.tolist() for rows in seen[:3] for row in rows]
    # all have an order of the same 256 numbers of their own
    for number, draw in enumerate(draws):
        assert not any(
            set(draw) <= set(other) for at, other in enumerate(draws) if at != number
        )
    np.testing.assert_array_equal(seen[0], seen[3])
