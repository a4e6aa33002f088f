"""The model around the encoding: it knows no scheme, and schemes of one seed share
their weights.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import changed, encoded
from torch import Tensor
from torch.testing import assert_close

import posbench
from posbench.config.schema import AttentionConfig, Config
from posbench.model import IGNORED
from posbench.model.gpt import GPT, ChangedReading, build, parameter_counts

V = 50
NAMES = posbench.encodings.names()


def built(
    config: Config,
    name: str,
    vocab_size: int = V,
    block: dict[str, Any] | None = None,
    **options: object,
) -> GPT:
    config = encoded(config, name, **options)
    config = changed(config, model=block or {})
    return build(config, vocab_size)


def random_ids(*size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(V, size, generator=generator)


def weights_of(model: GPT) -> dict[str, Tensor]:
    """Return the weights outside of the encoding."""
    weights = {}
    for name, weight in model.named_parameters():
        if not name.startswith("encoding."):
            weights[name] = weight
    return weights


@pytest.mark.parametrize("name", ["rope", "learned", "fox"])
def test_runs_of_one_seed_start_from_the_same_weights_whatever_the_encoding(
    tiny_config, name
):
    plain = weights_of(built(tiny_config, "none"))
    other = weights_of(built(tiny_config, name))
    assert other.keys() == plain.keys()
    for key, weight in other.items():
        assert torch.equal(weight, plain[key]), key


def test_another_seed_has_other_weights(tiny_config):
    first = built(tiny_config, "none")
    second = built(changed(tiny_config, seed=1), "none")
    assert not torch.equal(first.tokens.weight, second.tokens.weight)


def test_building_a_model_draws_nothing_from_the_global_stream(tiny_config):
    state = torch.get_rng_state()
    built(tiny_config, "learned")
    assert torch.equal(torch.get_rng_state(), state)


def test_parameters_are_counted_apart(tiny_config):
    model = built(tiny_config, "learned")

    counts = parameter_counts(model)

    d = tiny_config.model.d_model
    layers = tiny_config.model.n_layers
    norms = 2 * d
    attention = 4 * d * d
    mlp = 2 * 4 * d * d
    table = tiny_config.training.train_length * d
    blocks = layers * (norms + attention + mlp) + d
    assert counts["encoding"] == table
    assert counts["non_embedding"] == blocks + table
    assert counts["total"] == V * d + blocks + table


def test_a_model_without_mlps_has_a_norm_and_attention_in_each_block(tiny_config):
    model = built(tiny_config, "none", V, {"d_ff": 0})

    counts = parameter_counts(model)

    d = tiny_config.model.d_model
    block = d + 4 * d * d
    assert counts["non_embedding"] == d + tiny_config.model.n_layers * block


def deviation(weight: Tensor) -> float:
    return float(weight.detach().std())


DEVIATIONS = [
    ("fan_in", 0.05, 256**-0.5, 256**-0.5),
    ("gpt2", 0.02, 0.02, 0.02 / 2),  # 0.02 / sqrt(2 x 2)
]


@pytest.mark.parametrize(("init", "tokens", "qkv", "out"), DEVIATIONS)
def test_initialisation_is_by_fan_in_or_like_gpt2(tiny_config, init, tokens, qkv, out):
    block = {"d_model": 256, "n_heads": 4, "init": init}
    model = built(tiny_config, "none", 500, block)
    first, last = model.blocks
    assert deviation(model.tokens.weight) == pytest.approx(tokens, rel=0.03)
    assert deviation(first.attention.qkv.weight) == pytest.approx(qkv, rel=0.03)
    assert deviation(last.attention.out.weight) == pytest.approx(out, rel=0.03)


WINDOWS = [(8, False), (9, True), (64, True)]


@pytest.mark.parametrize(("window", "sees"), WINDOWS)
@pytest.mark.parametrize("of_encoding", [True, False])
def test_sinks_of_a_reading_are_hidden_where_the_window_of_a_layer_is_as_narrow(
    tiny_config, window, sees, of_encoding
):
    if of_encoding:
        layers = [{"name": "rope", "window": window}]
        model = built(tiny_config, "layered", layers=layers)
    else:
        attention = AttentionConfig(window, sinks=0)
        model = built(tiny_config, "rope", block={"attention": attention})
    ids = random_ids(1, 64)
    no_sinks = ChangedReading(window=8, sinks=0)
    two_sinks = ChangedReading(window=8, sinks=2)

    plain = model.hidden(ids, reading=no_sinks)
    with_sinks = model.hidden(ids, reading=two_sinks)

    assert torch.equal(plain, with_sinks) != sees


def masked(share: float) -> tuple[Tensor, Tensor]:
    """Return ids and labels, (3, 11) each; about this share of the labels is scored."""
    ids, labels = random_ids(2, 3, 11)
    generator = torch.Generator().manual_seed(1)
    drawn = torch.rand(labels.shape, generator=generator)
    return ids, labels.masked_fill(drawn >= share, IGNORED)


def gradients(model: GPT, loss: Tensor) -> tuple[Tensor, ...]:
    parameters = list(model.parameters())
    return torch.autograd.grad(loss, parameters)


SHARES = [(0.1, True), (0.5, False)]


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize(("share", "tied"), SHARES)
def test_the_loss_of_masked_labels_and_its_gradients_are_torchs(
    tiny_config, share, counted, tied
):
    block = {"tie_embeddings": tied}
    model = built(tiny_config, "minmax", block=block, combine="concat")
    ids, labels = masked(share)
    n_scored = None
    if counted:
        n_scored = int((labels != IGNORED).sum())

    ours = model(ids, labels, n_scored=n_scored)

    logits = model(ids).flatten(0, 1)
    theirs = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED)
    assert_close(ours, theirs, atol=1e-6, rtol=0)
    our_gradients = gradients(model, ours)
    their_gradients = gradients(model, theirs)
    assert_close(our_gradients, their_gradients, atol=1e-6, rtol=1e-5)


def test_the_loss_of_no_label_is_0_and_so_are_its_gradients(tiny_config):
    model = built(tiny_config, "none")
    ids, labels = masked(0.0)

    loss = model(ids, labels)

    assert loss.detach() == 0
    for gradient in gradients(model, loss):
        assert not gradient.any()


QWEN3 = {
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "self_attn.o_proj": "attention.out",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}


def weights_of_qwen3(model: GPT, width: int) -> dict[str, Tensor]:
    ours = dict(model.named_parameters())
    weights = {
        "model.embed_tokens.weight": ours["tokens.weight"],
        "lm_head.weight": ours["tokens.weight"],
        "model.norm.weight": ours["norm.weight"],
    }
    for layer in range(model.config.n_layers):
        here = f"blocks.{layer}"
        there = f"model.layers.{layer}"
        qkv = ours[f"{here}.attention.qkv.weight"]
        q, k, v = qkv.split([4 * width, 2 * width, 2 * width])
        weights[f"{there}.self_attn.q_proj.weight"] = q
        weights[f"{there}.self_attn.k_proj.weight"] = k
        weights[f"{there}.self_attn.v_proj.weight"] = v
        for name, source in QWEN3.items():
            weights[f"{there}.{name}.weight"] = ours[f"{here}.{source}.weight"]
    return weights


def test_logits_equal_qwen3s_of_transformers_with_shared_heads_and_norms_of_q_and_k(
    tiny_config,
):
    transformers = pytest.importorskip("transformers")
    block = {
        "norm": "rmsnorm",
        "mlp": "swiglu",
        "n_heads": 4,
        "n_kv_heads": 2,
        "qk_norm": True,
        "tie_embeddings": True,
    }
    model = built(tiny_config, "rope", block=block, layout="half").eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms of 1 would hide errors
            stream = torch.Generator().manual_seed(0)
            drawn = torch.randn(parameter.shape, generator=stream)
            parameter.add_(0.1 * drawn)
    width = model.config.d_model // 4
    settings = transformers.Qwen3Config(
        vocab_size=V,
        hidden_size=model.config.d_model,
        intermediate_size=model.config.hidden_width,
        head_dim=width,
        num_hidden_layers=model.config.n_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        pad_token_id=None,
    )
    qwen3 = transformers.Qwen3ForCausalLM(settings).eval()
    qwen3.load_state_dict(weights_of_qwen3(model, width))
    ids = random_ids(2, 9)

    ours = model(ids)
    theirs = qwen3(ids).logits

    assert_close(ours, theirs, atol=2e-5, rtol=0)
