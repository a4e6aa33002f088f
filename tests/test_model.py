"""The model around the encoding: it knows no scheme, and schemes of one seed share
their weights.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import changed, encoded

import posbench
from posbench.config.schema import AttentionConfig, Config
from posbench.model.gpt import GPT, Reading, build, parameter_counts
from posbench.model.loss import IGNORED

V = 50
NAMES = posbench.encodings.names()


def built(
    config: Config,
    name: str,
    vocab_size: int = V,
    block: dict[str, Any] = {},  # noqa: B006
    **options: object,
) -> GPT:
    return build(changed(encoded(config, name, **options), model=block), vocab_size)


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", NAMES)
def test_the_future_never_reaches_the_past_through_the_whole_model(tiny_config, name):
    model = built(tiny_config, name)
    with torch.no_grad():
        for parameter in model.encoding.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(0))
    ids = torch.randint(V, (2, 12), generator=torch.Generator().manual_seed(1))
    changed = ids.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % V
    torch.testing.assert_close(
        model(ids)[:, :7], model(changed)[:, :7], atol=1e-5, rtol=1e-5
    )
    assert not torch.allclose(model(ids)[:, 7:], model(changed)[:, 7:])


@pytest.mark.parametrize("name", ["rope", "learned", "fox"])
def test_runs_of_one_seed_start_from_the_same_weights_whatever_the_encoding(
    tiny_config, name
):
    state = torch.get_rng_state()
    plain = dict(built(tiny_config, "none").named_parameters())
    other = {
        k: v
        for k, v in built(tiny_config, name).named_parameters()
        if not k.startswith("encoding.")
    }
    assert other.keys() == plain.keys()
    assert not [key for key in plain if key.endswith("bias") or "head" in key]
    assert all(torch.equal(weight, plain[key]) for key, weight in other.items())
    another = built(changed(tiny_config, seed=1), name)
    assert not torch.equal(
        another.blocks[0].attention.qkv.weight, plain["blocks.0.attention.qkv.weight"]
    )
    assert torch.equal(torch.get_rng_state(), state)


def test_parameters_are_counted_apart_and_a_concatenated_code_narrows_the_token_table(
    tiny_config,
):
    d = tiny_config.model.d_model
    layers = tiny_config.model.n_layers
    block = 2 * d + 3 * d * d + d * d + 2 * 4 * d * d
    counts = parameter_counts(built(tiny_config, "learned"))
    assert counts["encoding"] == tiny_config.training.train_length * d
    assert counts["total"] == V * d + layers * block + d + counts["encoding"]
    assert counts["non_embedding"] == counts["total"] - V * d
    assert parameter_counts(built(tiny_config, "none", V, {"d_ff": 0}))[
        "non_embedding"
    ] == d + layers * (d + 4 * d * d)
    model = built(tiny_config, "sinusoidal", combine="concat")
    assert model.tokens.weight.shape == (V, d - d // 4)
    assert model(torch.zeros(2, 5, dtype=torch.long)).shape == (2, 5, V)


def test_initialisation_is_by_fan_in_or_like_gpt2(tiny_config):
    for init, token_rms, qkv, out in (
        ("fan_in", 0.05, 256**-0.5, 256**-0.5),
        ("gpt2", 0.02, 0.02, 0.02 / 2),
    ):
        # 0.02 / sqrt(2 x 2)
        model = built(
            tiny_config, "none", 500, {"d_model": 256, "n_heads": 4, "init": init}
        )
        weights = [
            model.tokens.weight,
            model.blocks[0].attention.qkv.weight,
            model.blocks[1].attention.out.weight,
        ]
        assert [float(weight.detach().std()) for weight in weights] == pytest.approx(
            [token_rms, qkv, out], rel=0.03
        )


def test_sinks_of_a_reading_are_hidden_where_the_window_of_a_layer_is_as_narrow(
    tiny_config,
):
    ids = torch.randint(V, (1, 64), generator=torch.Generator().manual_seed(0))
    for window, sees in ((8, False), (9, True), (64, True)):
        for name, options in (
            ("layered", {"layers": [{"name": "rope", "window": window}]}),
            ("rope", {}),
        ):
            block = {"attention": AttentionConfig(None if options else window, sinks=0)}
            model = built(tiny_config, name, block=block, **options)
            plain, sinks = (
                model.hidden(ids, reading=Reading(window=8, sinks=number))
                for number in (0, 2)
            )
            assert torch.equal(plain, sinks) != sees, (window, name)


def masked(share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels, (3, 11) each; about this share of the labels is scored."""
    ids, labels = torch.randint(
        V, (2, 3, 11), generator=torch.Generator().manual_seed(0)
    )
    hidden = (
        torch.rand(labels.shape, generator=torch.Generator().manual_seed(1)) >= share
    )
    return ids, labels.masked_fill(hidden, IGNORED)


def gradients(model: GPT, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize(
    ("share", "counted", "tied"), [(0.1, True, True), (0.5, False, False)]
)
def test_the_loss_of_masked_labels_and_its_gradients_are_torchs_and_of_none_0(
    tiny_config, share, counted, tied
):
    model = built(
        tiny_config, "minmax", block={"tie_embeddings": tied}, combine="concat"
    )
    ids, labels = masked(share)
    ours = model(
        ids, labels, n_scored=int((labels != IGNORED).sum()) if counted else None
    )
    theirs = F.cross_entropy(
        model(ids).flatten(0, 1), labels.flatten(), ignore_index=IGNORED
    )
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    torch.testing.assert_close(
        gradients(model, ours), gradients(model, theirs), atol=1e-6, rtol=1e-5
    )
    none = model(*masked(0.0))
    assert none.detach() == 0
    assert not any(gradient.any() for gradient in gradients(model, none))


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
    model = built(tiny_config, "rope", block=block, layout="half")
    with torch.no_grad():
        for parameter in model.parameters():  # norms of 1 would hide errors
            parameter.add_(
                0.1
                * torch.randn(
                    parameter.shape, generator=torch.Generator().manual_seed(0)
                )
            )
    shape = model.config
    ours = dict(model.named_parameters())
    width = shape.d_model // shape.n_heads
    settings = transformers.Qwen3Config(
        vocab_size=V,
        hidden_size=shape.d_model,
        intermediate_size=shape.hidden_width,
        head_dim=width,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        pad_token_id=None,
    )
    weights = {
        "model.embed_tokens.weight": ours["tokens.weight"],
        "lm_head.weight": ours["tokens.weight"],
    }
    weights["model.norm.weight"] = ours["norm.weight"]
    for layer in range(shape.n_layers):
        here = f"blocks.{layer}."
        there = f"model.layers.{layer}."
        qkv = ours[f"{here}attention.qkv.weight"].split(
            [4 * width, 2 * width, 2 * width]
        )
        weights |= {
            f"{there}self_attn.{name}_proj.weight": part
            for name, part in zip("qkv", qkv, strict=True)
        }
        weights |= {
            f"{there}{name}.weight": ours[f"{here}{source}.weight"]
            for name, source in QWEN3.items()
        }
    theirs = transformers.Qwen3ForCausalLM(settings).eval()
    theirs.load_state_dict(weights)
    ids = torch.randint(V, (2, 9), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model.eval()(ids), theirs(ids).logits, atol=2e-5, rtol=0)
