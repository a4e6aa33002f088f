"""What is particular to one scheme: worked numbers, its authors' starting values, its own messages."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import schemes
import torch
from oracles import fire as oracle_of_fire
from oracles import third_party, third_party_file
from torch import Tensor, nn

from posbench import attention, attention_logits, attention_output, encodings
from posbench.encodings.base import Shape
from posbench.encodings.rope import Spectrum, ntk_by_parts
from posbench.errors import OptionError, UserError
from posbench.model.attention import make_layer
from posbench.model.standalone import whole_block

SHAPE = Shape(d_model=32, n_heads=4, n_layers=2, train_length=64)
FP32 = {"atol": 1e-5, "rtol": 1e-5}  # sums of fp32 numbers of size 1 in another order


def build(name: str, shape: Shape = SHAPE, **options: Any) -> Any:
    return encodings.build(name, shape, options)


def layer_inputs(length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return schemes.layer_inputs(SHAPE, length)


def bias_of(encoding: Any, positions: Tensor, layer: int) -> Tensor:
    """The bias of a whole layer, of random queries and keys at positions (1, T)."""
    q, k, v, x = layer_inputs(positions.shape[1])
    _, q, k, _, described = whole_block(encoding, q, k, v, make_layer(encoding, positions, layer, x))
    return encoding.bias(q, k, described)  # type: ignore[no-any-return]


def assert_gradients_equal(ours: Tensor, theirs: Tensor, leaves: list[Tensor], rtol: float) -> None:
    gradients = (torch.autograd.grad(loss, leaves, retain_graph=True) for loss in (ours, theirs))
    for actual, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5 * max(1, expected.abs().max().item()), rtol=rtol)


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.inf, math.nan, -1.0])
def test_options_that_are_not_finite_and_bases_below_1_are_refused(value: float) -> None:
    options = [(name, each) for name in encodings.names() for each in encodings.options_of(name).items()]
    numbers = [(name, option) for name, (option, default) in options if type(default) is float]
    assert len(numbers) > 50
    for name, option in numbers:
        if value != -1 or option == "base":
            with pytest.raises(OptionError, match=f"encoding.{option} is "):
                build(name, Shape(16, 2, 2, 16), **{option: value})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("rop", {}, r"unknown encoding 'rop': did you mean 'rope'\? \('posbench list' shows all\)"),
        ("alibi", {"base": 1}, "'alibi' has no option 'base': it accepts slopes"),
        ("binary", {"digits": 33}, "encoding.digits is 33 for 'binary': expected 1 to 32"),
        ("alibi", {"slopes": [1.0]}, r"encoding.slopes is \[1.0\] for 'alibi': expected 4 numbers, one per head"),
        ("t5", {"max_distance": 16}, "encoding.max_distance is 16 for 't5': expected more than half of num_buckets"),
        ("deberta", {"num_buckets": 7}, "encoding.num_buckets is 7 for 'deberta': expected an even number from 4"),
        ("dape", {"inner": "rope"}, "encoding.inner is 'rope': expected one that only adds a bias"),
        ("dape_v2", {"kernel": 2}, "encoding.kernel is 2 for 'dape_v2': expected an odd number of keys"),
        ("liere", {"block": 5}, "encoding.block is 5 for 'liere': expected a divisor of the 8 channels"),
    ],
)
def test_a_wrong_choice_is_one_line(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=rf"^{message}.*$"):
        build(name, **options)


# -- codes at the input ------------------------------------------------------------------------------------------------


def test_index_on_all_channels_is_invisible_behind_a_layernorm_and_on_the_first_is_not() -> None:
    x = torch.randn(1, 20, 32)
    norm = nn.LayerNorm(32)
    for direction, visible in (("ones", False), ("first", True)):
        coded = build("index", direction=direction, scale=1.0).embed(x, torch.arange(20)[None])
        assert torch.allclose(norm(coded), norm(x), atol=1e-4) != visible


def test_the_random_direction_of_index_is_a_unit_vector_and_the_same_in_every_run() -> None:
    first, second = (build("index", direction="random").code(torch.ones(1, 1)) for _ in range(2))
    assert torch.equal(first, second) and first.norm().item() == pytest.approx(1, abs=1e-6)


# -- frequencies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "train_length", "alpha", "beta", "slow"),
    [
        *((1e4, *given, True) for given in ((64, 40.0, 80.0), (64, 10.2, 10.3), (4, 1.0, 32.0))),  # none turns often
        *((1e4, 4096, *given, False) for given in ((1e-9, 2e-9), (1e-3, 2e-3))),  # all turn often
        (10.0, 65536, 1.0, 32.0, False),
        (1.001, 4096, 1.0, 32.0, False),
    ],
)
def test_the_index_ramp_beyond_its_ends_slows_all_but_the_first_pair_or_none(
    base: float, train_length: int, alpha: float, beta: float, slow: bool
) -> None:
    for head_dim in (16, 64, 128):
        inv_freq = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        spectrum = Spectrum(inv_freq, base, train_length, torch.tensor(0.0))
        kept = ntk_by_parts(spectrum, 2.0, "index", alpha, beta)[0] / inv_freq
        assert kept.tolist() == [1.0] + [0.5 if slow else 1.0] * (head_dim // 2 - 1)


def test_longrope_leaves_a_short_sequence_alone_beside_a_long_one() -> None:
    encoding = build("longrope")
    q, k, v, x = layer_inputs(20)
    positions = torch.stack([torch.arange(20), torch.arange(20) + 50])  # train_length 64: the second is beyond it
    together = attention_output(encoding, q, k, v, x, positions=positions)
    for b in range(2):
        one = slice(b, b + 1)
        alone = attention_output(encoding, q[one], k[one], v[one], x[one], positions=positions[one])
        torch.testing.assert_close(together[one], alone, rtol=0, atol=0)
    rope = attention_logits(build("rope"), q, k, positions=positions).tril()
    changed = (attention_logits(encoding, q, k, positions=positions).tril() / encoding.attention_factor**2 - rope).abs()
    assert changed[0].max() < 1e-5 and changed[1].max() > 1e-2


@pytest.mark.parametrize("start", [0, 1_000_000])
def test_xpos_guards_the_span_of_positions_and_not_their_number(start: int) -> None:
    encoding = build("xpos", Shape(16, 2, 1, 16))
    assert encoding.max_length == 1024
    q, k, v = torch.randn(3, 2, 2, 4, 8)
    fits = torch.tensor([[0, 1, 2, 3], [0, 1, 500, 1023]]) + start
    assert attention_output(encoding, q, k, v, positions=fits).isfinite().all()
    beyond = torch.tensor([[0, 1, 2, 3], [0, 1, 500, 1024]]) + start
    wider = build("xpos", Shape(16, 2, 1, 16), scale_base=9.0)
    assert attention_output(wider, q, k, v, positions=beyond).isfinite().all()
    assert encoding.decay(beyond)[0].isfinite().all() and encoding.decay(beyond)[1].isnan().all()


@pytest.mark.parametrize(
    ("num_buckets", "max_distance"), [(32, 128), (32, 64), (32, 17), (32, 256), (8, 20), (64, 1000), (2, 2), (7, 40)]
)
def test_t5_buckets_equal_transformers_at_every_distance(num_buckets: int, max_distance: int) -> None:
    bucket = third_party("transformers.models.t5.modeling_t5").T5Attention._relative_position_bucket
    distance = torch.arange(-5, 4 * max_distance + 1)
    expected = bucket(-distance, bidirectional=False, num_buckets=num_buckets, max_distance=max_distance)
    encoding = build("t5", num_buckets=num_buckets, max_distance=max_distance)
    assert torch.equal(encoding.bucket(distance), expected)


def test_fope_without_its_draw_is_rope_on_the_pairs_that_come_round_in_training() -> None:
    shape = Shape(64, 4, 2, train_length=64)
    q, k = torch.randn(2, 2, 4, 40, 16)
    rope = build("rope", shape)
    every = rope.inv_freq()
    kept = rope.rescaled(every * (every >= 2 * math.pi / 64))  # 1, 0.316 and 0.1 of eight
    actual = attention_logits(build("fope", shape, gain=0.0), q, k)
    torch.testing.assert_close(actual, attention_logits(kept, q, k), **FP32)


def test_fope_draws_its_weights_alike_in_every_run_and_as_large_as_xaviers() -> None:
    shape = Shape(768, 12, 4, train_length=4096)  # at base 100 all 32 frequencies come round
    first = build("fope", shape, base=100.0).coefficients
    torch.manual_seed(1)
    assert torch.equal(build("fope", shape, base=100.0).coefficients, first)
    heads, kept, turning = first.shape[-3:]
    assert (heads, kept, turning) == (12, 32, 16)
    drawn = first - build("fope", shape, base=100.0, gain=0.0).coefficients
    xavier = nn.init.xavier_normal_(torch.empty(heads, kept, turning), gain=0.3)
    assert drawn.std().item() == pytest.approx(xavier.std().item(), rel=0.05)
    assert (first - drawn).sum(-2).eq(1).all()  # each pair has one frequency of its own


def test_a_canon_layer_convolves_keys_before_they_are_shared_by_a_group_of_queries() -> None:
    shape = Shape(32, 4, 2, 64, n_kv_heads=2)
    encoding = build("canon", shape)
    assert {name: weight.shape[1] for name, weight in encoding.weights.items()} == {"q": 4, "k": 2, "v": 2}
    few = torch.randn(1, 2, 9, 8)
    shared = few.repeat_interleave(2, dim=1)
    _, convolved = schemes.rotated_at(encoding, shared, shared, torch.arange(9)[None])
    assert torch.equal(convolved[:, 0], convolved[:, 1]) and not torch.equal(convolved[:, 1], convolved[:, 2])


def test_cca_with_shared_keys_is_zayas() -> None:
    shape = Shape(32, 4, 1, 64, n_kv_heads=2)
    encoding = build("cca", shape)
    q, few_k, few_v = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    config = SimpleNamespace(
        hidden_size=64, cca_time0=2, cca_time1=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        attention_bias=False,
    )  # fmt: skip
    picked = torch.eye(64).split([32, 16, 8, 8])
    weights = dict(zip(("q_proj", "k_proj", "v_proj_current", "v_proj_delayed"), picked, strict=True))
    weights |= {"conv_qk_depthwise": encoding.by_channel[0].weight, "conv_qk_grouped": encoding.by_head[0].weight}
    named = {f"{name}.weight": weight for name, weight in weights.items()}
    named |= {"conv_qk_depthwise.bias": encoding.by_channel[0].bias, "conv_qk_grouped.bias": encoding.by_head[0].bias}
    projection = third_party("transformers.models.zaya.modeling_zaya").ZayaCCAProjection(config, 0)
    wide = torch.cat([a.transpose(1, 2).flatten(2) for a in (q, few_k, few_v)], dim=-1)
    expected = [a.transpose(1, 2) for a in torch.func.functional_call(projection, named, (wide, None))]
    k, v = (a.repeat_interleave(2, dim=1) for a in (few_k, few_v))
    counting = torch.arange(9)[None]
    used, layer = schemes.used_at(encoding, counting)
    ours = [*used.rotate(q, k, layer), used.map_values(v, layer)]
    for actual, theirs in zip([ours[0], ours[1][:, ::2], ours[2][:, ::2]], expected, strict=True):
        torch.testing.assert_close(actual, theirs, **FP32)


@pytest.mark.parametrize(
    ("name", "r1", "r2", "expected"),  # at distances 0, 1, 4 and 10
    [
        ("kerple_log", -3.0, 0.5, [0.0, -0.0040547, -0.0109861, -0.0179176]),  # r1 counts as 0.01
        ("kerple_power", 0.5, 7.0, [0.0, -0.5, -8.0, -50.0]),  # r2 counts as 2
    ],
)
def test_kerples_numbers_beyond_their_bounds_count_as_these_and_still_get_gradients(
    name: str, r1: float, r2: float, expected: list[float]
) -> None:
    kerple = build(name, Shape(8, 1, 1, 32))
    with torch.no_grad():
        kerple.r1.fill_(r1)
        kerple.r2.fill_(r2)
    bias = kerple.distance_bias(torch.tensor([0, 1, 4, 10]), make_layer(kerple, torch.arange(11)[None]))
    torch.testing.assert_close(bias, torch.tensor([expected]), atol=1e-6, rtol=1e-6)
    bias.sum().backward()
    assert kerple.r1.grad.item() != 0 and kerple.r2.grad.item() != 0


@pytest.mark.parametrize(
    ("i", "j", "share"), [(1, 0, 0.0240981), (100, 50, 0.4530270), (100, 0, 0.6062818), (1000, 500, 0.8519441)]
)
def test_fire_worked_shares(i: int, j: int, share: float) -> None:
    encoding = build("fire", threshold=512)
    with torch.no_grad():  # a network that gives back its input
        for parameter in encoding.networks[0].parameters():
            parameter.zero_()
        encoding.networks[0][0].weight[0] = encoding.networks[0][2].weight[:, 0] = 1
    assert bias_of(encoding, torch.tensor([[j, i]]), 0)[0, :, 1, 0].tolist() == pytest.approx([share] * 4, abs=1e-6)


def test_fire_starts_interpolating_at_a_quarter_of_the_training_length_as_its_authors_do() -> None:
    # The listing in the paper's appendix: init_c 0.1, init_L 512, of models trained on 2048 tokens.
    encoding = encodings.build("fire", Shape(64, 4, 2, 2048))
    assert encoding.c.tolist() == pytest.approx([0.1, 0.1])
    assert encoding.threshold == 512 and encoding.multiplier.tolist() == [1.0, 1.0]
    assert encodings.build("fire", Shape(64, 4, 2, 2048), {"threshold": None}).threshold == 2048


def test_fire_bias_by_pieces_equals_the_network_run_on_every_pair_also_with_units_that_never_switch() -> None:
    encoding = build("fire", threshold=16.5)  # not a position, where the gradient of a maximum has two values
    with torch.no_grad():
        first = encoding.networks[1][0]
        first.weight.normal_()
        first.bias.normal_()
        first.weight[0], first.bias[0] = 0, 1  # a unit that is always on
        first.weight[1], first.bias[1] = 0, -1  # and one that never is
        first.weight[2], first.bias[2] = 0, 0
    inputs, positions = layer_inputs(50), torch.arange(50)[None]
    by_pieces = bias_of(encoding, positions, 1)
    parameters = dict(encoding.named_parameters())
    by_network = oracle_of_fire.reference(parameters, SHAPE, {"threshold": 16.5}, *inputs, positions, 1, True)["bias"]
    torch.testing.assert_close(by_pieces, by_network, **FP32)
    upstream = torch.randn_like(by_pieces)
    leaves = [encoding.c, encoding.multiplier, *encoding.networks[1].parameters()]
    assert_gradients_equal((by_pieces * upstream).sum(), (by_network * upstream).sum(), leaves, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_weight_of_alibi_underflows_where_its_slope_times_distance_exceeds_the_exponents_range(dtype: Any) -> None:
    encoding, zeros = build("alibi", Shape(256, 1, 1, 16), slopes=[0.5]), torch.zeros(1, 1, 256, 256, dtype=dtype)
    weights = attention(encoding, zeros, zeros, torch.eye(256, dtype=dtype).expand_as(zeros))[0, 0, -1].flip(-1)
    assert weights[: int(86 / 0.5)].all() and not weights[int(104 / 0.5) :].any()  # 2^-126, 2^-149 with subnormals


# -- pairs and weights -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["path", "path_fox", "selective_rope"])
def test_a_scheme_starts_as_in_its_authors_models_with_small_weights_or_with_torchs_own(name: str) -> None:
    # fla's PaTHAttentionPreTrainedModel: every Linear and Conv1d normal with deviation 0.02, biases 0.
    shape = Shape(128, 4, 3, 64)
    torch.manual_seed(0)
    encoding = build(name, shape, **({"gate": True} if name == "selective_rope" else {}))
    layers = {type(module): [] for module in encoding.modules() if isinstance(module, nn.Linear | nn.Conv1d)}
    for module in encoding.modules():
        if type(module) in layers:
            layers[type(module)].append(module.weight.detach().flatten())
            assert module.bias is None or not module.bias.any()
    for kind, weights in layers.items():
        drawn = torch.cat(weights)
        assert float(drawn.std()) == pytest.approx(0.02, rel=0.1) and float(drawn.mean().abs()) < 0.003, kind
        assert drawn.unique().numel() > 0.99 * drawn.numel()
    torch.manual_seed(0)
    former = build(name, shape, start="torch").get_parameter("down.0.weight")
    torch.manual_seed(0)
    assert torch.equal(former, nn.Linear(128, 32, bias=False).weight)


def test_path_over_several_key_blocks_equals_fla_in_values_and_gradients() -> None:
    encoding = build("path")
    q, k, v, x = (tensor.requires_grad_() for tensor in layer_inputs(150))
    ours = attention_output(encoding, q, k, v, x)
    w, beta = encoding.prepare(q, k, make_layer(encoding, torch.arange(150)[None], 0, x))
    naive = third_party_file("fla", "ops/path_attn/naive.py").naive_path_attn
    given = [part.transpose(1, 2) for part in (q, k, v, w, beta)]
    theirs = naive(*given, torch.zeros_like(given[-1]), encoding.logit_scale).transpose(1, 2)
    torch.testing.assert_close(ours, theirs, **FP32)
    leaves = [q, k, v, x, *(p for name, p in encoding.named_parameters() if ".0." in name)]
    upstream = torch.randn_like(ours)
    assert_gradients_equal((ours * upstream).sum(), (theirs * upstream).sum(), leaves, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [[1, 0, 0], [0.5, 0.5, 0], [0.25, 0.5, 0.25]]),
        ({"attend_current": True}, [[1, 0, 0], [0.25, 0.75, 0], [0.125, 0.25, 0.625]]),
        ({"remainder": False}, [[0, 0, 0], [0.5, 0, 0], [0.25, 0.5, 0]]),
        ({"attend_current": True, "remainder": False}, [[0.5, 0, 0], [0.25, 0.5, 0], [0.125, 0.25, 0.5]]),
    ],
)
@pytest.mark.parametrize("causal", [True, False])
def test_stick_breaking_worked_weights(options: dict[str, bool], expected: list[list[float]], causal: bool) -> None:
    encoding = build("stick_breaking", Shape(3, 1, 1, 8), **options)
    zeros = torch.zeros(1, 1, 3, 3)
    weights = attention_output(encoding, zeros, zeros, torch.eye(3)[None, None], causal=causal)
    torch.testing.assert_close(weights[0, 0], torch.tensor(expected))


def test_stick_breaking_stays_finite_where_logits_are_extreme() -> None:
    q, k, v, _ = layer_inputs(30)
    q, k = (100 * q).requires_grad_(), (100 * k).requires_grad_()
    out = attention_output(build("stick_breaking"), q, k, v)
    assert out.isfinite().all() and out.abs().max() <= v.abs().max() * (1 + 1e-5)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(out.sum(), (q, k)))
