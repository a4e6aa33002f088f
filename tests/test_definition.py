"""Attention weights: of a run from Python, and those that the model's own path uses."""

import pytest
import schemes
import torch
from support import TINY, each_once, write_words
from torch.testing import assert_close

import posbench as api
from posbench.config.schema import AttentionConfig, ModelConfig
from posbench.encodings.base import Shape
from posbench.model.definition import by_definition
from posbench.model.gpt import GPT

SHAPE = Shape(d_model=32, n_heads=4, n_layers=2, train_length=32)
IDS = torch.arange(40).reshape(2, 20)
# one for each way to act: at the input, on queries and keys, on logits, by a window,
# on the softmax, in place of it
ACTING = ["none", "sinusoidal", "rope", "t5", "fox", "learned_sinks", "stick_breaking"]


@pytest.fixture(scope="module")
def model_of(tiny_config):
    def build(name: str, **changes: object) -> GPT:
        encoding = schemes.build(name, {}, SHAPE)
        sizes = vars(tiny_config.model) | {"n_heads": 4} | changes
        return GPT(ModelConfig(**sizes), 50, encoding).eval()

    return build


@pytest.mark.parametrize("name", ACTING)
@torch.no_grad()
def test_weights_times_values_are_the_outputs_of_the_models_own_path(name, model_of):
    model = model_of(name)
    outputs = []
    for block in model.blocks:
        block.attention.out.register_forward_pre_hook(
            lambda module, given: outputs.append(given[0])
        )
    expected_states = model.hidden(IDS)
    own_outputs = list(outputs)

    states, layers = by_definition(model, IDS)

    assert_close(states, expected_states, atol=1e-5, rtol=1e-4)
    for layer, expected in zip(layers, own_outputs, strict=True):
        output = layer.weights @ layer.values
        joined = output.transpose(1, 2).flatten(2)
        assert_close(joined, expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_the_models_window_and_sinks_hold_in_the_weights(model_of):
    model = model_of("rope", attention=AttentionConfig(window=3, sinks=1))
    expected = model.hidden(IDS)

    states, layers = by_definition(model, IDS)

    assert_close(states, expected, atol=1e-5, rtol=1e-4)
    is_seen = layers[0].weights[0, 0, 10] > 0
    assert is_seen.nonzero().flatten().tolist() == [0, 8, 9, 10]


@torch.no_grad()
def test_a_forward_hook_on_a_blocks_attention_fires(model_of):
    model = model_of("alibi")
    seen = []
    model.blocks[1].attention.register_forward_hook(
        lambda module, given, output: seen.append((given[0].shape, output.shape))
    )

    model(IDS)

    assert seen == [((2, 20, 32), (2, 20, 32))]


def test_a_run_gives_the_attention_weights_of_a_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_words(tmp_path)
    words = [*TINY, "data.path=text.txt", "training.tokens=256", "ratio=1"]
    run = api.train(each_once([*words, "encoding=alibi", "windowed=false"]))

    weights = run.attention("abc def")

    assert weights.shape == (1, 2, 8, 8)  # the separator comes first
    assert_close(weights.sum(-1), torch.ones(1, 2, 8))
    assert weights.triu(1).count_nonzero() == 0
