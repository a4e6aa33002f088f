"""Scores of single tokens: against contexts put together one by one, and where less is computed than everything."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from support import Largest

from posbench import encodings
from posbench.config.schema import Config
from posbench.data.tokens import TokenSplit
from posbench.evaluation import protocols
from posbench.evaluation.models import TrainedGPT, Variant, nll_of, score
from posbench.evaluation.protocols import Windows, targets_of
from posbench.model import attention
from posbench.model.gpt import GPT, Reading, build

V = 50
CPU = torch.device("cpu")
# fp32 sums of a few hundred terms through two layers, in another order. Nll is of the order of 4.
TOLERANCE = 2e-5


def model_of(tiny_config: Config, name: str = "rope", **options: Any) -> GPT:
    encoding = dataclasses.replace(tiny_config.encoding, name=name, options=options)
    model = build(dataclasses.replace(tiny_config, encoding=encoding), V).eval()
    for parameter in model.encoding.parameters():  # some begin as zeros, which would hide what they do
        torch.nn.init.normal_(parameter)
    return model


def text(n: int = 4000) -> TokenSplit:
    ids = np.random.default_rng(0).integers(0, V, n).astype(np.uint16)
    return TokenSplit(ids=ids, starts=np.array([0, n], dtype=np.int64))


def subject_of(model: GPT) -> TrainedGPT:
    return TrainedGPT(model, "mine", model.encoding.shape.train_length, CPU, torch.float32)


def scores_of(model: GPT, split: TokenSplit, windows: Windows, batch_tokens: int = 2048) -> np.ndarray:
    return score(subject_of(model), split, windows, batch_tokens).ravel()


@pytest.mark.parametrize("protocol", ["fixed_target", "nonoverlap"])
def test_every_target_is_scored_after_the_context_that_its_window_holds(protocol: str, tiny_config: Config) -> None:
    model, split = model_of(tiny_config), text()
    windows = protocols.plan(protocol, split, [24], 8, 16, "concat")[24]
    targets, nll = targets_of(windows), scores_of(model, split, windows)
    ids = torch.from_numpy(split.ids.astype(np.int64))
    for i in [*range(0, 24, 5), *range(30, len(nll), 7)]:
        at, context = targets.indices[i], targets.context[i]
        with torch.inference_mode():
            logits = model(ids[None, at - context : at])[0, -1].double()
        expected = float(torch.logsumexp(logits, 0) - logits[ids[at]])
        assert nll[i] == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", encodings.names())
def test_the_last_rows_alone_are_the_last_rows_of_all(name: str, tiny_config: Config) -> None:
    model = model_of(tiny_config, name)
    length = min(40, model.encoding.max_length or 40)
    ids = torch.randint(V, (3, length), generator=torch.Generator().manual_seed(0))
    positions = model.encoding.positions(ids, torch.Generator().manual_seed(0))
    positions = positions if "positions" in model.encoding.hooks else None
    with torch.inference_mode():
        for window, last in ((None, 7), (12, 1)):
            reading = Reading(window=window)
            alone = model.hidden(ids, positions, last=last, reading=reading)
            everything = model.hidden(ids, positions, reading=reading)
            # Normalised states are of the order of 1; learned parameters drawn from N(0, 1) make large logits.
            torch.testing.assert_close(alone, everything[:, -last:], atol=1e-4, rtol=1e-4)


def test_sinks_are_seen_beside_the_window_and_nothing_else_is(tiny_config: Config) -> None:
    """One layer: what stands between the sinks and the window does not matter, sinks and window do."""
    config = dataclasses.replace(tiny_config, model=dataclasses.replace(tiny_config.model, n_layers=1))
    model = build(config, V).eval()
    ids = torch.randint(V, (1, 32), generator=torch.Generator().manual_seed(0))
    reading = Reading(window=8, sinks=3)
    with torch.inference_mode():
        before = model.hidden(ids, reading=reading)[0, -1]
        for place, matters in ((0, True), (2, True), (3, False), (23, False), (24, True), (30, True)):
            other = ids.clone()
            other[0, place] = (other[0, place] + 1) % V
            after = model.hidden(other, reading=reading)[0, -1]
            assert bool((after != before).any()) is matters, place


def test_what_a_variant_becomes_reads_with_its_window_and_its_encoding(tiny_config: Config) -> None:
    subject, ids = subject_of(model_of(tiny_config)), text(65).ids[None].astype(np.int64)
    plain = nll_of(subject, ids, 8, 0)
    narrowed = subject.varied(Variant(window=4, sinks=2), 64)
    stretched = subject.varied(Variant(extension="pi:factor=4"), 64)
    assert narrowed.facts == {"sinks": 2} and stretched.facts is not None and stretched.facts["factor"] == 4
    scores = [nll_of(varied.subject, ids, 8, 0) for varied in (narrowed, stretched)]
    assert all(np.abs(score - plain).max() > 1e-3 for score in scores)
    np.testing.assert_array_equal(nll_of(subject, ids, 8, 0), plain)
    np.testing.assert_array_equal(nll_of(subject.varied(Variant(), 64).subject, ids, 8, 0), plain)


def test_positions_are_drawn_for_each_seed_length_and_window(
    tiny_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = model_of(tiny_config, "randomized"), np.tile(text(65).ids.astype(np.int64), (3, 1))
    seen: list[np.ndarray] = []
    hidden = model.hidden

    def spied(inputs: torch.Tensor, positions: torch.Tensor, **more: Any) -> torch.Tensor:
        seen.append(positions.numpy())
        return hidden(inputs, positions, **more)

    monkeypatch.setattr(model, "hidden", spied)
    subject = subject_of(model)
    for one, length in ((subject, 64), (dataclasses.replace(subject, seed=1), 64), (subject, 32), (subject, 64)):
        nll_of(one, ids[:, : length + 1], 8, 7)
    draws = [row.tolist() for rows in seen[:3] for row in rows]
    for number, draw in enumerate(draws):  # all have an order of the same 256 numbers of their own
        assert not any(set(draw) <= set(other) for at, other in enumerate(draws) if at != number)
    np.testing.assert_array_equal(seen[0], seen[3])


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "sinks"), [("cope", 0), ("shaw", 4), ("rope", 4)])
def test_at_64_train_lengths_no_tensor_grows_with_the_square_of_the_length(
    name: str, sinks: int, tiny_config: Config
) -> None:
    training = dataclasses.replace(tiny_config.training, train_length=64)
    model, split, length = model_of(dataclasses.replace(tiny_config, training=training), name), text(5000), 64 * 64
    windows = Windows(length, 8, np.array([100]), np.array([0]), "concat")
    subject = subject_of(model).varied(Variant(window=64 if sinks else None, sinks=sinks), length).subject
    with Largest() as largest:
        nll = score(subject, split, windows, batch_tokens=2048)
    assert np.isfinite(nll).all()
    assert 0 < largest.numbers <= 2 * attention.AT_ONCE < model.config.n_heads * length**2 / 4
