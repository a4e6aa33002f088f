"""What is particular to one scheme: its authors' starting values, its own messages,
what its oracle cannot say.
"""

import math
from types import SimpleNamespace
from typing import Any

import oracles
import pytest
import schemes
import torch
from oracles import third_party
from test_oracles import Setting, compare
from torch import nn

from posbench import attention_output, encodings
from posbench.encodings.base import Shape
from posbench.errors import OptionError, Undefined
from posbench.model.attention import make_layer
from posbench.model.standalone import whole_block

SHAPE = Shape(d_model=32, n_heads=4, n_layers=2, train_length=64)
FP32 = {"atol": 1e-5, "rtol": 1e-5}  # sums of fp32 numbers of size 1 in another order


def build(name: str, shape: Shape = SHAPE, **options: Any) -> Any:
    return encodings.build(name, shape, options)


def test_options_that_are_not_finite_and_bases_below_1_are_refused():
    options = [
        (name, each)
        for name in encodings.names()
        for each in encodings.options_of(name).items()
    ]
    numbers = [
        (name, option) for name, (option, default) in options if type(default) is float
    ]
    assert len(numbers) > 50
    for name, option in numbers:
        for value in (math.inf, math.nan, *([-1.0] if option == "base" else [])):
            with pytest.raises(OptionError, match=f"encoding.{option} is "):
                build(name, Shape(16, 2, 2, 16), **{option: value})


def test_the_random_direction_of_index_is_a_unit_vector_and_the_same_in_every_run():
    first, second = (
        build("index", direction="random").code(torch.ones(1, 1)) for _ in range(2)
    )
    assert torch.equal(first, second)
    assert first.norm().item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("start", [0, 1_000_000])
def test_xpos_guards_the_span_of_positions_and_not_their_number(start):
    encoding = build("xpos", Shape(16, 2, 1, 16))
    q, k, v = torch.randn(3, 2, 2, 4, 8)
    fits = torch.tensor([[0, 1, 2, 3], [0, 1, 500, 1023]]) + start
    assert attention_output(encoding, q, k, v, positions=fits).isfinite().all()
    beyond = torch.tensor([[0, 1, 2, 3], [0, 1, 500, 1024]]) + start
    with pytest.raises(
        Undefined, match="positions 1024 or more apart are beyond 'xpos'"
    ):
        attention_output(encoding, q, k, v, positions=beyond)


def test_fope_draws_its_weights_alike_in_every_run_and_as_large_as_xaviers():
    # at base 100 all 32 frequencies come round
    shape = Shape(768, 12, 4, train_length=4096)
    first = build("fope", shape, base=100.0).coefficients
    torch.manual_seed(1)
    assert torch.equal(build("fope", shape, base=100.0).coefficients, first)
    drawn = first - build("fope", shape, base=100.0, gain=0.0).coefficients
    xavier = nn.init.xavier_normal_(torch.empty(first.shape[-3:]), gain=0.3)
    assert drawn.std().item() == pytest.approx(xavier.std().item(), rel=0.05)
    assert (first - drawn).sum(-2).eq(1).all()  # each pair has one frequency of its own


def test_cca_with_shared_keys_is_zayas():
    encoding = build("cca", Shape(32, 4, 1, 64, n_kv_heads=2))
    q = torch.randn(2, 4, 9, 8)
    few_k = torch.randn(2, 2, 9, 8)
    few_v = torch.randn(2, 2, 9, 8)
    config = SimpleNamespace(
        hidden_size=64,
        cca_time0=2,
        cca_time1=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        attention_bias=False,
    )
    picked = torch.eye(64).split([32, 16, 8, 8])
    weights = dict(
        zip(
            ("q_proj", "k_proj", "v_proj_current", "v_proj_delayed"),
            picked,
            strict=True,
        )
    )
    weights |= {
        "conv_qk_depthwise": encoding.by_channel[0].weight,
        "conv_qk_grouped": encoding.by_head[0].weight,
    }
    named = {f"{name}.weight": weight for name, weight in weights.items()}
    named |= {
        "conv_qk_depthwise.bias": encoding.by_channel[0].bias,
        "conv_qk_grouped.bias": encoding.by_head[0].bias,
    }
    projection = third_party(
        "transformers.models.zaya.modeling_zaya"
    ).ZayaCCAProjection(config, 0)
    wide = torch.cat([a.transpose(1, 2).flatten(2) for a in (q, few_k, few_v)], dim=-1)
    expected = [
        a.transpose(1, 2)
        for a in torch.func.functional_call(projection, named, (wide, None))
    ]
    k, v = (a.repeat_interleave(2, dim=1) for a in (few_k, few_v))
    used, layer = schemes.used_at(encoding, torch.arange(9)[None])
    ours = [*used.rotate(q, k, layer), used.map_values(v, layer)]
    for actual, theirs in zip(
        [ours[0], ours[1][:, ::2], ours[2][:, ::2]], expected, strict=True
    ):
        torch.testing.assert_close(actual, theirs, **FP32)


def test_fire_starts_interpolating_at_a_quarter_of_the_training_length_as_its_authors_do():
    # The listing in the paper's appendix: init_c 0.1, init_L 512, of models trained on
    # 2048 tokens.
    encoding = build("fire", Shape(64, 4, 2, 2048))
    assert encoding.c.tolist() == pytest.approx([0.1, 0.1])
    assert encoding.threshold == 512
    assert encoding.multiplier.tolist() == [1.0, 1.0]
    assert build("fire", Shape(64, 4, 2, 2048), threshold=None).threshold == 2048


def test_fire_bias_by_pieces_equals_the_network_run_on_every_pair_also_with_units_that_never_switch():
    # not a position, where the gradient of a maximum has two values
    encoding = build("fire", threshold=16.5)
    with torch.no_grad():
        first = encoding.networks[1][0]
        first.weight.normal_()
        first.bias.normal_()
        # always on, never, and neither
        first.weight[:3] = 0
        first.bias[:3] = torch.tensor([1, -1, 0])
    (q, k, v, x), positions = schemes.layer_inputs(SHAPE, 50), torch.arange(50)[None]
    by_pieces = encoding.bias(
        q, k, whole_block(encoding, q, k, v, make_layer(encoding, positions, 1, x))[-1]
    )
    options = {"threshold": 16.5}
    parameters = dict(encoding.named_parameters())
    by_network = oracles.of("fire").reference(
        parameters, SHAPE, options, positions, layer=1, causal=True
    )["bias"]
    torch.testing.assert_close(by_pieces, by_network, **FP32)
    upstream = torch.randn_like(by_pieces)
    leaves = [encoding.c, encoding.multiplier, *encoding.networks[1].parameters()]
    gradients = (
        torch.autograd.grad((bias * upstream).sum(), leaves)
        for bias in (by_pieces, by_network)
    )
    for actual, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(
            actual, expected, atol=1e-5 * max(1, expected.abs().max().item()), rtol=1e-3
        )


@pytest.mark.parametrize("name", ["path", "path_fox", "selective_rope"])
def test_a_scheme_starts_as_in_its_authors_models_with_small_weights(name):
    # fla's PaTHAttentionPreTrainedModel: every Linear and Conv1d normal with deviation
    # 0.02, biases 0.
    encoding = build(
        name,
        Shape(128, 4, 3, 64),
        **({"gate": True} if name == "selective_rope" else {}),
    )
    modules = [
        module
        for module in encoding.modules()
        if isinstance(module, nn.Linear | nn.Conv1d)
    ]
    assert not any(module.bias.any() for module in modules if module.bias is not None)
    for kind in (nn.Linear, nn.Conv1d):
        drawn = torch.cat(
            [
                module.weight.detach().flatten()
                for module in modules
                if isinstance(module, kind)
            ]
        )
        assert (
            float(drawn.std()) == pytest.approx(0.02, rel=0.1)
            and float(drawn.mean().abs()) < 0.003
        ), kind


@pytest.mark.parametrize("name", ["path", "path_fox"])
def test_path_over_several_key_blocks_equals_fla_in_values_and_gradients(name):
    compare(name, {}, Setting(70, 1, 8, "far", 0), causal=True)


def test_stick_breaking_stays_finite_where_logits_are_extreme():
    q, k, v, _ = schemes.layer_inputs(SHAPE, 30)
    q = (100 * q).requires_grad_()
    k = (100 * k).requires_grad_()
    out = attention_output(build("stick_breaking"), q, k, v)
    assert out.isfinite().all()
    assert out.abs().max() <= v.abs().max() * (1 + 1e-5)
    assert all(
        gradient.isfinite().all() for gradient in torch.autograd.grad(out.sum(), (q, k))
    )
