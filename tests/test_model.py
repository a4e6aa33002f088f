"""The model around the encoding: it knows no scheme, and schemes of one seed share their weights."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import posbench
from posbench.config.schema import Config, EncodingConfig
from posbench.encodings.rope import Rotary
from posbench.model.gpt import GPT, build, parameter_counts
from posbench.model.loss import IGNORED, linear_cross_entropy

V = 50


def with_encoding(config: Config, name: str, **options: object) -> Config:
    return dataclasses.replace(config, encoding=dataclasses.replace(config.encoding, name=name, options=options))


def built(config: Config, name: str, **options: object) -> GPT:
    return build(with_encoding(config, name, **options), V)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", posbench.encodings.names())
def test_the_future_never_reaches_the_past_through_the_whole_model(tiny_config: Config, name: str) -> None:
    model = built(tiny_config, name)
    with torch.no_grad():
        for parameter in model.encoding.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(0))
    ids = torch.randint(V, (2, 12), generator=torch.Generator().manual_seed(1))
    changed = ids.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % V
    torch.testing.assert_close(model(ids)[:, :7], model(changed)[:, :7], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(model(ids)[:, 7:], model(changed)[:, 7:])


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", posbench.encodings.names())
def test_runs_of_one_seed_start_from_the_same_model_weights_whatever_the_encoding(
    tiny_config: Config, name: str
) -> None:
    plain = dict(built(tiny_config, "none").named_parameters())
    other = {k: v for k, v in built(tiny_config, name).named_parameters() if not k.startswith("encoding.")}
    assert other.keys() == plain.keys()
    assert all(torch.equal(weight, plain[key]) for key, weight in other.items())


def test_another_seed_gives_other_weights(tiny_config: Config) -> None:
    one, two = (built(dataclasses.replace(tiny_config, seed=seed), "none").tokens.weight for seed in (0, 1))
    assert not torch.equal(one, two)


def test_building_leaves_the_global_generator_alone(tiny_config: Config) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    built(tiny_config, "fox")
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(("norm", "mlp"), [("layernorm", "gelu"), ("rmsnorm", "swiglu")])
def test_both_block_styles_have_no_biases_and_a_tied_head(tiny_config: Config, norm: str, mlp: str) -> None:
    shape = dataclasses.replace(tiny_config.model, norm=norm, mlp=mlp)
    model = build(dataclasses.replace(with_encoding(tiny_config, "rope"), model=shape), V)
    names = [name for name, _ in model.named_parameters()]
    assert not [name for name in names if name.endswith("bias") or name.startswith("head")]
    assert model(torch.zeros(1, 5, dtype=torch.long)).shape == (1, 5, V)


def test_the_two_mlps_cost_about_the_same_parameters(tiny_config: Config) -> None:
    def mlp_size(mlp: str) -> int:
        shape = dataclasses.replace(tiny_config.model, mlp=mlp, d_model=384, n_heads=6)
        model = build(dataclasses.replace(with_encoding(tiny_config, "none"), model=shape), V)
        return sum(p.numel() for name, p in model.named_parameters() if ".mlp." in name)

    assert mlp_size("swiglu") == pytest.approx(mlp_size("gelu"), rel=0.02)


def test_parameter_counts_separate_the_encoding_and_the_token_table(tiny_config: Config) -> None:
    d, layers = tiny_config.model.d_model, tiny_config.model.n_layers
    block = 2 * d + 3 * d * d + d * d + 2 * 4 * d * d
    counts = parameter_counts(built(tiny_config, "learned"))
    assert counts["encoding"] == tiny_config.training.train_length * d
    assert counts["total"] == V * d + layers * block + d + counts["encoding"]
    assert counts["non_embedding"] == counts["total"] - V * d


def test_a_concatenated_code_narrows_the_token_table_and_the_head_with_it(tiny_config: Config) -> None:
    d = tiny_config.model.d_model
    model = built(tiny_config, "sinusoidal", combine="concat")
    assert model.tokens.weight.shape == (V, d - d // 4)
    assert model(torch.zeros(2, 5, dtype=torch.long)).shape == (2, 5, V)


def test_initialisation_is_by_fan_in_or_like_gpt2(tiny_config: Config) -> None:
    wide = dataclasses.replace(tiny_config.model, d_model=256, n_heads=4)
    for init, token_rms, qkv, out in (("fan_in", 0.05, 256**-0.5, 256**-0.5), ("gpt2", 0.02, 0.02, 0.02 / 2)):
        shape = dataclasses.replace(wide, init=init)  # two layers: 0.02 / sqrt(2 x 2)
        model = build(dataclasses.replace(with_encoding(tiny_config, "none"), model=shape), 500)
        found = [model.tokens.weight, model.blocks[0].attention.qkv.weight, model.blocks[1].attention.out.weight]
        assert [float(weight.detach().std()) for weight in found] == pytest.approx([token_rms, qkv, out], rel=0.03)


# -- the loss of labels ------------------------------------------------------------------------------------------------


def masked(share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels (3, 11), of which about this share is scored."""
    ids, labels = torch.randint(V, (2, 3, 11), generator=torch.Generator().manual_seed(0))
    hidden = torch.rand(labels.shape, generator=torch.Generator().manual_seed(1)) >= share
    return ids, labels.masked_fill(hidden, IGNORED)


def gradients(model: GPT, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_the_loss_of_masked_labels_and_its_gradients_are_torchs(
    tiny_config: Config, share: float, told: bool, tied: bool
) -> None:
    shape = dataclasses.replace(tiny_config.model, tie_embeddings=tied)
    model = built(dataclasses.replace(tiny_config, model=shape), "minmax", combine="concat")
    ids, labels = masked(share)
    n_scored = int((labels != IGNORED).sum())
    ours = model(ids, labels, n_scored=n_scored if told else None)
    theirs = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    for one, other in zip(gradients(model, ours), gradients(model, theirs), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_where_nothing_is_scored_the_loss_and_its_gradients_are_0(tiny_config: Config) -> None:
    model = built(tiny_config, "rope")
    loss = model(*masked(0.0))
    assert loss.detach() == 0 and not any(gradient.any() for gradient in gradients(model, loss))


def test_a_loss_of_all_labels_is_that_of_all_logits_to_the_bit(tiny_config: Config) -> None:
    model = built(tiny_config, "minmax", combine="concat")
    ids, labels = masked(1.0)
    for given in ({}, {"n_scored": labels.numel()}):
        read, weight = model._into_head(model.hidden(ids).flatten(0, 1))
        ours, by_hand = model(ids, labels, **given), linear_cross_entropy(read, weight, labels.flatten())
        assert torch.equal(ours, by_hand)
        assert all(map(torch.equal, gradients(model, ours), gradients(model, by_hand)))


def test_the_head_runs_on_scored_rows_alone_and_no_device_is_asked_for_their_number(tiny_config: Config) -> None:
    class Seen(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.products: list[tuple[int, ...]] = []
            self.waits: list[str] = []

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            if function.overloadpacket is torch.ops.aten.mm and out.shape[-1] == V:
                self.products.append(tuple(out.shape))
            if function.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero):
                self.waits.append(str(function))
            return out

    model = built(tiny_config, "rope")
    ids, labels = masked(0.5)
    n_scored = int((labels != IGNORED).sum())
    with Seen() as told:
        model(ids, labels, n_scored=n_scored)
    with Seen() as untold:
        model(ids, labels)
    assert told.waits == [] and len(untold.waits) == 1
    assert 0 < n_scored < labels.numel() and told.products == [(n_scored, V)]


def test_logits_equal_gpt2s_of_another_library_with_the_same_weights(tiny_config: Config) -> None:
    """The whole block, not only the encoding: transformers' GPT-2 with its biases at zero."""
    transformers = pytest.importorskip("transformers")
    shape = tiny_config.model
    model = built(tiny_config, "learned").eval()
    settings = transformers.GPT2Config(
        vocab_size=V, n_positions=tiny_config.training.train_length, n_embd=shape.d_model, n_layer=shape.n_layers,
        n_head=shape.n_heads, activation_function="gelu", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    theirs = transformers.GPT2LMHeadModel(settings).eval()
    ours = dict(model.named_parameters())
    weights = {name: torch.zeros_like(value) for name, value in theirs.state_dict().items()}
    weights["transformer.wte.weight"] = weights["lm_head.weight"] = ours["tokens.weight"]
    weights["transformer.wpe.weight"] = next(model.encoding.parameters())
    weights["transformer.ln_f.weight"] = ours["norm.weight"]
    for layer in range(shape.n_layers):
        for name, source in {
            "ln_1": "attention_norm", "attn.c_attn": "attention.qkv", "attn.c_proj": "attention.out",
            "ln_2": "mlp_norm", "mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down",
        }.items():  # fmt: skip
            weight = ours[f"blocks.{layer}.{source}.weight"]
            weights[f"transformer.h.{layer}.{name}.weight"] = weight.mT if weight.dim() == 2 else weight
    theirs.load_state_dict(weights)
    ids = torch.randint(V, (2, 9), generator=torch.Generator().manual_seed(0))
    # 1e-5 tells exact GELU from its tanh form (2e-4) and a wrong norm epsilon apart from fp32 rounding.
    torch.testing.assert_close(model(ids), theirs(ids).logits, atol=1e-5, rtol=0)


def test_logits_equal_qwen3s_of_another_library_with_the_same_weights(tiny_config: Config) -> None:
    """Shared heads of keys and values, and norms of queries and keys."""
    transformers = pytest.importorskip("transformers")
    block = {"norm": "rmsnorm", "mlp": "swiglu", "n_heads": 4, "n_kv_heads": 2, "qk_norm": True, "tie_embeddings": True}
    config = dataclasses.replace(tiny_config, model=dataclasses.replace(tiny_config.model, **block))
    model, shape = built(config, "rope", layout="half").eval(), config.model
    with torch.no_grad():
        for parameter in model.parameters():  # norms of 1 would hide errors
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    width = shape.d_model // shape.n_heads
    settings = transformers.Qwen3Config(
        vocab_size=V, hidden_size=shape.d_model, intermediate_size=shape.hidden_width, head_dim=width,
        num_hidden_layers=shape.n_layers, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, pad_token_id=None,
    )  # fmt: skip
    theirs = transformers.Qwen3ForCausalLM(settings).eval()
    ours = dict(model.named_parameters())
    weights = {"model.embed_tokens.weight": ours["tokens.weight"], "lm_head.weight": ours["tokens.weight"]}
    weights["model.norm.weight"] = ours["norm.weight"]
    for layer in range(shape.n_layers):
        here, there = f"blocks.{layer}.", f"model.layers.{layer}."
        qkv = ours[f"{here}attention.qkv.weight"].split([4 * width, 2 * width, 2 * width])
        weights |= {f"{there}self_attn.{name}_proj.weight": part for name, part in zip("qkv", qkv, strict=True)}
        for name, source in {
            "self_attn.q_norm": "attention.q_norm", "self_attn.k_norm": "attention.k_norm",
            "self_attn.o_proj": "attention.out", "input_layernorm": "attention_norm",
            "post_attention_layernorm": "mlp_norm", "mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up",
            "mlp.down_proj": "mlp.down",
        }.items():  # fmt: skip
            weights[f"{there}{name}.weight"] = ours[f"{here}{source}.weight"]
    theirs.load_state_dict(weights)
    ids = torch.randint(V, (2, 9), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(ids), theirs(ids).logits, atol=2e-5, rtol=0)


# -- what the layers of a forward pass share ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rope", "xpos", "longrope", "partial_rope", "layered"])
def test_tables_of_positions_are_made_once_in_a_forward_pass_and_anew_in_the_next(
    tiny_config: Config, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model = build(dataclasses.replace(tiny_config, encoding=EncodingConfig(name)), 50)
    ids, calls = torch.randint(50, (2, 12)), []
    rotary = [module for module in model.modules() if isinstance(module, Rotary)]
    real = Rotary.rotation
    monkeypatch.setattr(Rotary, "rotation", lambda self, *given: calls.append(1) or real(self, *given))
    expected = model(ids)
    assert len(calls) == 1 and len(model.blocks) == 2
    rotary[0].attention_factor = 2.0
    assert not torch.equal(model(ids), expected) and len(calls) == 2
