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
from oracles._shared import flat
from test_oracles import Setting, compare
from torch import nn
from torch.testing import assert_close

from posbench import attention_output, encodings
from posbench.encodings.base import Shape
from posbench.errors import OptionError, Undefined
from posbench.model.attention import make_layer
from posbench.model.standalone import prepared_block

SHAPE = Shape(d_model=32, n_heads=4, n_layers=2, train_length=64)
FP32 = {"atol": 1e-5, "rtol": 1e-5}  # sums of fp32 numbers of size 1 in another order


def build(name: str, shape: Shape = SHAPE, **options: Any) -> Any:
    return encodings.build(name, shape, options)


def numbers() -> list[tuple[str, str]]:
    """Return every option whose default is a number, as (scheme, option)."""
    found = []
    for name in encodings.names():
        for option, default in encodings.options_of(name).items():
            if type(default) is float:
                found.append((name, option))
    return found


def test_many_options_are_numbers():
    assert len(numbers()) > 50


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize(("name", "option"), numbers())
def test_an_option_that_is_not_finite_is_refused(name, option, value):
    with pytest.raises(OptionError, match=f"encoding.{option} is "):
        build(name, **{option: value})


WITH_BASE = [name for name, option in numbers() if option == "base"]


@pytest.mark.parametrize("name", WITH_BASE)
def test_a_base_below_1_is_refused(name):
    with pytest.raises(OptionError, match=r"encoding\.base is "):
        build(name, base=-1.0)


def test_the_random_direction_of_index_is_a_unit_vector_and_the_same_in_every_run():
    one = torch.ones(1, 1)
    first = build("index", direction="random").code(one)
    second = build("index", direction="random").code(one)
    assert torch.equal(first, second)
    size = first.norm().item()
    assert size == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("start", [0, 1_000_000])
def test_xpos_guards_the_span_of_positions_and_not_their_number(start):
    shape = Shape(16, 2, 1, 16)
    encoding = build("xpos", shape)
    q, k, v = torch.randn(3, 2, 2, 4, 8)
    fits = torch.tensor([[0, 1, 2, 3], [0, 1, 500, 1023]]) + start
    beyond = torch.tensor([[0, 1, 2, 3], [0, 1, 500, 1024]]) + start

    out = attention_output(encoding, q, k, v, positions=fits)

    assert out.isfinite().all()
    message = "positions 1024 or more apart are beyond 'xpos'"
    with pytest.raises(Undefined, match=message):
        attention_output(encoding, q, k, v, positions=beyond)


WIDE = Shape(768, 12, 4, train_length=4096)


def test_fope_draws_its_weights_alike_in_every_run():
    first = build("fope", WIDE).coefficients

    torch.manual_seed(1)
    again = build("fope", WIDE).coefficients

    assert torch.equal(again, first)


def test_fope_draws_weights_as_large_as_xaviers_around_one_frequency_a_pair():
    # at base 100 all 32 frequencies come round
    identity = build("fope", WIDE, base=100.0, gain=0.0).coefficients
    started = build("fope", WIDE, base=100.0).coefficients
    drawn = started - identity
    empty = torch.empty(drawn.shape[-3:])
    xavier = nn.init.xavier_normal_(empty, gain=0.3)
    deviation = drawn.std().item()
    expected = xavier.std().item()
    assert deviation == pytest.approx(expected, rel=0.05)
    assert identity.sum(-2).eq(1).all()


def test_cca_with_shared_keys_is_zayas():
    shape = Shape(32, 4, 1, 64, n_kv_heads=2)
    encoding = build("cca", shape)
    q = torch.randn(2, 4, 9, 8)
    k = torch.randn(2, 2, 9, 8)
    v = torch.randn(2, 2, 9, 8)
    config = SimpleNamespace(
        hidden_size=64,
        cca_time0=2,
        cca_time1=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        attention_bias=False,
    )
    pick = torch.eye(64)
    by_channel = encoding.by_channel[0]
    by_head = encoding.by_head[0]
    weights = {
        "q_proj.weight": pick[:32],
        "k_proj.weight": pick[32:48],
        "v_proj_current.weight": pick[48:56],
        "v_proj_delayed.weight": pick[56:],
        "conv_qk_depthwise.weight": by_channel.weight,
        "conv_qk_depthwise.bias": by_channel.bias,
        "conv_qk_grouped.weight": by_head.weight,
        "conv_qk_grouped.bias": by_head.bias,
    }
    zaya = third_party("transformers.models.zaya.modeling_zaya")
    projection = zaya.ZayaCCAProjection(config, 0)
    flattened = [flat(q), flat(k), flat(v)]
    wide = torch.cat(flattened, dim=-1)
    expected = torch.func.functional_call(projection, weights, (wide, None))

    positions = torch.arange(9)[None]
    used, layer = schemes.used_at(encoding, positions)
    every_k = k.repeat_interleave(2, dim=1)
    every_v = v.repeat_interleave(2, dim=1)
    made_q, made_k = used.rotate(q, every_k, layer)
    made_v = used.map_values(every_v, layer)

    their_q, their_k, their_v = [each.transpose(1, 2) for each in expected]
    shared_k = made_k[:, ::2]
    shared_v = made_v[:, ::2]
    assert_close(made_q, their_q, **FP32)
    assert_close(shared_k, their_k, **FP32)
    assert_close(shared_v, their_v, **FP32)


def test_fire_starts_interpolating_at_a_quarter_of_the_training_length_as_its_authors_do():
    # The listing in the paper's appendix: init_c 0.1, init_L 512, of models trained on
    # 2048 tokens.
    shape = Shape(64, 4, 2, 2048)
    encoding = build("fire", shape)
    assert encoding.c.tolist() == pytest.approx([0.1, 0.1])
    assert encoding.threshold_at_start == 512
    assert encoding.multiplier.tolist() == [1.0, 1.0]
    without_threshold = build("fire", shape, threshold=None)
    assert without_threshold.threshold_at_start == 2048


def test_fires_bias_by_pieces_is_its_network_also_with_units_that_never_switch():
    # not a position, where the gradient of a maximum has two values
    encoding = build("fire", threshold=16.5)
    network = encoding.networks[1]
    with torch.no_grad():
        network[0].weight.normal_()
        network[0].bias.normal_()
        # always on, never, and neither
        network[0].weight[:3] = 0
        network[0].bias[:3] = torch.tensor([1, -1, 0])
    q, k, v, x = schemes.layer_inputs(SHAPE, 50)
    positions = torch.arange(50)[None]

    layer = make_layer(encoding, positions, 1, x)
    *_, layer = prepared_block(encoding, q, k, v, layer)
    by_pieces = encoding.bias(q, k, layer)

    parameters = dict(encoding.named_parameters())
    options = {"threshold": 16.5}
    oracle = oracles.of("fire")
    reference = oracle.reference(
        parameters, SHAPE, options, positions, layer=1, causal=True
    )
    by_network = reference["bias"]
    assert_close(by_pieces, by_network, **FP32)
    upstream = torch.randn_like(by_pieces)
    leaves = [encoding.c, encoding.multiplier, *network.parameters()]
    our_sum = (by_pieces * upstream).sum()
    their_sum = (by_network * upstream).sum()
    ours = torch.autograd.grad(our_sum, leaves)
    theirs = torch.autograd.grad(their_sum, leaves)
    for actual, expected in zip(ours, theirs, strict=True):
        size = expected.abs().max().item()
        largest = max(1, size)
        assert_close(actual, expected, atol=1e-5 * largest, rtol=1e-3)


STARTS = [("path", {}), ("path_fox", {}), ("selective_rope", {"gate": True})]


@pytest.mark.parametrize("kind", [nn.Linear, nn.Conv1d])
@pytest.mark.parametrize(("name", "options"), STARTS)
def test_a_scheme_starts_as_in_its_authors_models_with_small_weights(
    name, options, kind
):
    """fla's PaTHAttentionPreTrainedModel: every Linear and Conv1d normal with deviation
    0.02, biases 0.
    """
    shape = Shape(128, 4, 3, 64)
    encoding = build(name, shape, **options)
    modules = [module for module in encoding.modules() if isinstance(module, kind)]
    flat_weights = [module.weight.detach().flatten() for module in modules]
    weights = torch.cat(flat_weights)
    deviation = float(weights.std())
    mean = float(weights.mean())
    assert deviation == pytest.approx(0.02, rel=0.1)
    assert abs(mean) < 0.003
    biases = [module.bias for module in modules if module.bias is not None]
    for bias in biases:
        assert not bias.any()


@pytest.mark.parametrize("name", ["path", "path_fox"])
def test_path_over_several_key_blocks_equals_fla_in_values_and_gradients(name):
    setting = Setting(70, 1, 8, "far", 0)
    compare(name, {}, setting, causal=True)


def test_stick_breaking_stays_finite_where_logits_are_extreme():
    q, k, v, _ = schemes.layer_inputs(SHAPE, 30)
    q = (100 * q).requires_grad_()
    k = (100 * k).requires_grad_()
    encoding = build("stick_breaking")

    out = attention_output(encoding, q, k, v)

    largest_value = v.abs().max()
    assert out.isfinite().all()
    assert out.abs().max() <= largest_value * (1 + 1e-5)
    gradients = torch.autograd.grad(out.sum(), (q, k))
    for gradient in gradients:
        assert gradient.isfinite().all()
