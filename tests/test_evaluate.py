"""The numbers an evaluation gives, on models whose perplexity is known beforehand."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from posbench import evaluate
from posbench.config import Config
from posbench.data.tokens import Tokens, TokenSplit
from posbench.encodings.base import Encoding, Shape

V = 37
L = 16


class Planted(torch.nn.Module):
    """Stands in for a GPT: expects the token `distance` before the one to come, where it can see that far."""

    def __init__(self, distance: int | None, max_length: int | None = None) -> None:
        super().__init__()
        self.distance, self.window = distance, None
        self.encoding = Encoding(Shape(4, 1, 1, L))
        self.encoding.max_length = max_length

    def hidden(self, ids: Tensor) -> Tensor:
        out = torch.zeros(*ids.shape, V)
        if self.distance is not None and ids.shape[1] >= self.distance:
            seen = torch.nn.functional.one_hot(ids[:, : ids.shape[1] - self.distance + 1], V)
            out[:, self.distance - 1 :] = 20.0 * seen
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


class Bytes:
    """A tokenizer that only knows how many bytes its tokens have."""

    token_bytes = np.arange(V) % 3 + 1


def periodic(period: int, repeats: int = 80) -> TokenSplit:
    ids = np.tile(np.random.default_rng(0).integers(0, V, period), repeats).astype(np.uint16)
    return TokenSplit(ids=ids, starts=np.array([0, len(ids)], dtype=np.int64))


def rows_of(model: Planted, split: TokenSplit, config: Config, known: list[dict[str, Any]] | None = None):
    tokens = Tokens(train=split, validation=split, test=split, tokenizer=Bytes(), record={})  # type: ignore[arg-type]
    rows: list[dict[str, Any]] = []
    blocks: list[list[dict[str, Any]]] = []

    def report(row: dict[str, Any], of_block: list[dict[str, Any]]) -> None:
        rows.append(row)
        blocks.append(of_block)

    device = torch.device("cpu")
    evaluate.evaluate(model, tokens, config, 7, known or [], device, torch.float32, report)  # type: ignore[arg-type]
    return rows, blocks


@pytest.fixture
def config(tiny_config: Config) -> Config:
    settings = dataclasses.replace(
        tiny_config.evaluation, ratios=(1, 2, 4, 8, 16), targets=8, blocks=32, windowed=True,
        protocols=("fixed_target", "nonoverlap"), documents="auto", bootstrap=200,
    )  # fmt: skip
    training = dataclasses.replace(tiny_config.training, train_length=L)
    return dataclasses.replace(tiny_config, evaluation=settings, training=training)


def test_a_uniform_models_perplexity_is_the_vocabulary_size(config: Config) -> None:
    rows, _ = rows_of(Planted(None), periodic(48), config)
    assert len(rows) == 5 + 4 + 5
    for row in rows:
        assert row["status"] == "ok"
        assert row["perplexity"] == pytest.approx(V, rel=1e-6)
        assert row["nll"] == pytest.approx(math.log(V), rel=1e-6)


def test_a_model_that_copies_from_three_train_lengths_back_improves_only_from_4x_on(config: Config) -> None:
    rows, _ = rows_of(Planted(3 * L), periodic(3 * L), config)
    nll = {row["length_ratio"]: row["nll"] for row in rows if row["protocol"] == "fixed_target" and not row["window"]}
    assert nll[1] == pytest.approx(math.log(V), rel=1e-6)
    assert nll[2] == pytest.approx(math.log(V), rel=1e-6)
    assert max(nll[4], nll[8], nll[16]) < 1e-3


def test_fixed_target_rows_share_their_targets_at_every_length_and_with_the_windowed_baseline(config: Config) -> None:
    rows, _ = rows_of(Planted(None), periodic(48), config)
    by_protocol = {
        name: {row["targets_sha256"] for row in rows if row["protocol"] == name}
        for name in ("fixed_target", "nonoverlap")
    }
    assert len(by_protocol["fixed_target"]) == len(by_protocol["nonoverlap"]) == 1
    assert by_protocol["fixed_target"] != by_protocol["nonoverlap"]


def test_the_windowed_baseline_narrows_the_model_to_the_training_length_and_lets_go_of_it(config: Config) -> None:
    model = Planted(None)
    seen: list[tuple[int, int | None]] = []
    plain = model.hidden
    model.hidden = lambda ids: (seen.append((ids.shape[1], model.window)), plain(ids))[1]  # type: ignore[method-assign]
    rows, _ = rows_of(model, periodic(48), config)
    assert {length for length, window in seen if window == L} == {2 * L, 4 * L, 8 * L, 16 * L}
    assert {window for _, window in seen} == {None, L} and model.window is None
    assert [row["length"] for row in rows if row["window"] == L] == [2 * L, 4 * L, 8 * L, 16 * L]


def test_bits_per_byte_divides_by_the_bytes_of_the_scored_text(config: Config) -> None:
    split = periodic(48)
    rows, blocks = rows_of(Planted(None), split, config)
    row, of_block = rows[0], blocks[0]
    assert row["bits_per_byte"] == pytest.approx(row["n_tokens"] * math.log2(V) / row["n_bytes"], rel=1e-6)
    assert row["n_bytes"] == sum(block["n_bytes"] for block in of_block)
    assert 1 < row["n_bytes"] / row["n_tokens"] < 3


def test_blocks_add_up_to_their_row(config: Config) -> None:
    rows, blocks = rows_of(Planted(3 * L), periodic(3 * L), config)
    for row, of_block in zip(rows, blocks, strict=True):
        assert len(of_block) == row["n_blocks"]
        tokens = sum(block["n_tokens"] for block in of_block)
        assert tokens == row["n_tokens"]
        assert sum(block["nll_sum"] for block in of_block) / tokens == pytest.approx(row["nll"], abs=1e-9)
        assert row["ci_low"] <= row["nll"] <= row["ci_high"]


def test_lengths_beyond_the_schemes_end_are_rows_that_say_so(config: Config) -> None:
    rows, blocks = rows_of(Planted(None, max_length=2 * L), periodic(48), config)
    beyond = [(row, of_block) for row, of_block in zip(rows, blocks, strict=True) if row["length"] > 2 * L]
    assert len(beyond) == 3 + 3 + 3
    for row, of_block in beyond:
        assert (row["status"], of_block) == ("undefined", [])
        assert str(2 * L) in row["reason"]
        assert [row[key] for key in ("nll", "perplexity", "bits_per_byte", "ci_low", "n_tokens")] == [None] * 5


def test_a_text_too_short_for_a_length_gives_a_row_that_says_so(config: Config) -> None:
    rows, _ = rows_of(Planted(None), periodic(48, repeats=4), config)
    status = {row["length"]: row["status"] for row in rows if row["protocol"] == "fixed_target"}
    assert status == {L: "ok", 2 * L: "ok", 4 * L: "ok", 8 * L: "ok", 16 * L: "too_short"}


def test_a_known_cell_is_not_computed_again_but_one_on_other_targets_is(config: Config) -> None:
    rows, _ = rows_of(Planted(None), periodic(48), config)
    again, _ = rows_of(Planted(None), periodic(48), config, known=rows)
    assert again == []
    other = dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, targets=4))
    changed, _ = rows_of(Planted(None), periodic(48), other, known=rows)
    assert {row["protocol"] for row in changed} == {"fixed_target"} and len(changed) == 9
