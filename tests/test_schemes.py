"""What is particular to one scheme: worked numbers, limits in which it becomes another one, its own messages."""

import ast
import importlib.util
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import schemes
import torch
from oracles import fire as oracle_of_fire
from oracles import third_party, third_party_file
from torch import Tensor, nn

from posbench import attention_logits, attention_output, encodings
from posbench.encodings import _frequencies as rules
from posbench.encodings.base import Shape
from posbench.errors import OptionError, UserError
from posbench.model.attention import make_layer
from posbench.model.standalone import whole_block

SHAPE = Shape(d_model=32, n_heads=4, n_layers=2, train_length=64)
FP32 = {"atol": 1e-5, "rtol": 1e-5}  # sums of fp32 numbers of size 1 in another order


def build(name: str, shape: Shape = SHAPE, **options: Any) -> Any:
    return encodings.build(name, shape, options)


def layer_inputs(length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, 2, SHAPE.n_heads, length, SHAPE.head_dim)
    return q, k, v, torch.randn(2, length, SHAPE.d_model)


def assert_gradients_equal(ours: Tensor, theirs: Tensor, leaves: list[Tensor], rtol: float) -> None:
    gradients = (torch.autograd.grad(loss, leaves, retain_graph=True) for loss in (ours, theirs))
    for actual, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5 * max(1, expected.abs().max().item()), rtol=rtol)


# -- codes at the input -----------------------------------------------------------------------------------------------


def test_index_on_all_channels_is_invisible_behind_a_layernorm_and_on_the_first_is_not() -> None:
    x = torch.randn(1, 20, 32)
    norm = nn.LayerNorm(32)
    for direction, visible in (("ones", False), ("first", True)):
        coded = build("index", direction=direction, scale=1.0).embed(x, torch.arange(20)[None])
        assert torch.allclose(norm(coded), norm(x), atol=1e-4) != visible


def test_the_random_direction_of_index_is_a_unit_vector_and_the_same_in_every_run() -> None:
    torch.manual_seed(1)
    first = build("index", direction="random").code(torch.ones(1, 1))
    torch.manual_seed(2)
    torch.testing.assert_close(build("index", direction="random").code(torch.ones(1, 1)), first, rtol=0, atol=0)
    assert first.norm().item() == pytest.approx(1, abs=1e-6)


def test_binary_counts_as_far_as_the_training_length_by_default() -> None:
    lengths = {length: build("binary", Shape(32, 4, 1, length)).max_length for length in (1, 2, 3, 64, 65)}
    assert lengths == {1: 2, 2: 2, 3: 4, 64: 64, 65: 128}


@pytest.mark.parametrize("digits", [0, 33])
def test_binary_refuses_digits_that_do_not_fit(digits: int) -> None:
    with pytest.raises(UserError, match=rf"encoding.digits is {digits} for 'binary': expected 1 to 32"):
        build("binary", digits=digits)


# -- frequencies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in encodings.names() if "base" in encodings.options_of(name)])
@pytest.mark.parametrize("base", [-1.0, 0.5, 1.0])
def test_a_base_that_does_not_slow_one_pair_after_another_is_refused(name: str, base: float) -> None:
    with pytest.raises(UserError, match=rf"^encoding.base is {base:g} for '{name}': expected a number above 1 \(def"):
        build(name, base=base)


def index_ramp(head_dim: int, base: float, train_length: int, alpha: float, beta: float) -> list[float]:
    inv_freq = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    return rules.ramp("index", inv_freq, base, train_length, alpha, beta).tolist()


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_options_that_are_not_finite_are_refused(value: float) -> None:
    tried = [
        (name, option)
        for name in encodings.names()
        for option, default in encodings.options_of(name).items()
        if type(default) is float
    ]
    assert len(tried) > 50
    for name, option in tried:
        with pytest.raises(OptionError, match=f"encoding.{option} is "):
            encodings.build(name, Shape(16, 2, 2, 16), {option: value})


@pytest.mark.parametrize(("train_length", "alpha", "beta"), [(64, 40.0, 80.0), (64, 10.2, 10.3), (4, 1.0, 32.0)])
def test_the_index_ramp_slows_all_but_the_first_pair_where_none_makes_alpha_rotations(
    train_length: int, alpha: float, beta: float
) -> None:
    for head_dim in (16, 64, 128):
        assert train_length / (2 * math.pi) < alpha
        assert index_ramp(head_dim, 1e4, train_length, alpha, beta) == [0.0] + [1.0] * (head_dim // 2 - 1)


@pytest.mark.parametrize(
    ("base", "train_length", "alpha", "beta"),
    [(1e4, 4096, 1e-9, 2e-9), (10.0, 65536, 1.0, 32.0), (1e4, 4096, 1e-3, 2e-3), (1.001, 4096, 1.0, 32.0)],
)
def test_the_index_ramp_slows_no_pair_where_all_make_more_than_beta_rotations(
    base: float, train_length: int, alpha: float, beta: float
) -> None:
    for head_dim in (2, 16, 128):
        assert train_length / base / (2 * math.pi) > beta
        assert not any(index_ramp(head_dim, base, train_length, alpha, beta))


@pytest.mark.parametrize("ramp", ["index", "rotations"])
def test_yarn_refuses_options_that_leave_no_ramp(ramp: str) -> None:
    most, least = 64 / (2 * math.pi), 64 * 1e-3 / (2 * math.pi)  # rotations of the four pairs: most, .., least
    build("yarn", ramp=ramp, alpha=0.99 * most)
    build("yarn", ramp=ramp, alpha=1e-9, beta=1.01 * least)
    expected = "a number above 0 and below 10.19, the rotations of the fastest pair"
    with pytest.raises(UserError, match=rf"^encoding.alpha is 11 for 'yarn': expected {expected} .*\(default 1\)$"):
        build("yarn", ramp=ramp, alpha=11.0)
    expected = "a number above alpha, 1e-09, and above 0.01019, the rotations of the slowest pair"
    with pytest.raises(UserError, match=rf"^encoding.beta is 0.01 for 'yarn': expected {expected} \(default 32\)$"):
        build("yarn", ramp=ramp, alpha=1e-9, beta=0.01)


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
    with pytest.raises(UserError, match=r"^positions 1024 apart are beyond the end of 'xpos' .* than 1024\); a larger"):
        attention_output(encoding, q, k, v, positions=beyond)
    wider = build("xpos", Shape(16, 2, 1, 16), scale_base=9.0)
    assert attention_output(wider, q, k, v, positions=beyond).isfinite().all()


def test_xpos_gives_nan_for_such_a_span_where_nobody_waits_for_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # as accelerators do
    decay = build("xpos", Shape(16, 2, 1, 16)).decay(torch.tensor([[0, 1, 500, 1023], [0, 1, 500, 1024]]))
    assert decay[0].isfinite().all() and decay[1].isnan().all()


# -- T5 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_buckets", "max_distance"), [(32, 128), (32, 64), (32, 17), (32, 256), (8, 20), (64, 1000), (2, 2), (7, 40)]
)
def test_t5_buckets_equal_transformers_at_every_distance(num_buckets: int, max_distance: int) -> None:
    bucket = third_party("transformers.models.t5.modeling_t5").T5Attention._relative_position_bucket
    distance = torch.arange(-5, 4 * max_distance + 1)
    expected = bucket(-distance, bidirectional=False, num_buckets=num_buckets, max_distance=max_distance)
    encoding = build("t5", num_buckets=num_buckets, max_distance=max_distance)
    assert torch.equal(encoding.bucket(distance), expected)


def test_t5_refuses_a_max_distance_that_its_exact_buckets_already_cover() -> None:
    with pytest.raises(UserError, match=r"encoding.max_distance is 16 for 't5': expected more than half of num_buck"):
        build("t5", max_distance=16)
    with pytest.raises(UserError, match=r"encoding.num_buckets is 1 for 't5': expected at least 2"):
        build("t5", num_buckets=1)


def test_t5_remarks_that_its_last_buckets_stay_untrained() -> None:
    assert build("t5", max_distance=64).remarks() == []
    assert build("t5", max_distance=1001).remarks() == [
        "t5: max_distance 1001 exceeds train_length 64: the last buckets are never trained; "
        "encoding.max_distance=64 trains every bucket"
    ]


def test_a_ramp_by_rotations_that_spares_no_pair_is_remarked_on() -> None:
    assert build("yarn").remarks() == []  # the index ramp
    assert build("yarn", Shape(32, 4, 2, train_length=256), ramp="rotations").remarks() == []  # 256 > 2π·32
    (remark,) = build("yarn", ramp="rotations").remarks()
    assert remark.startswith("yarn: ramp=rotations with beta 32: no pair makes so many") and "about 4.1 " in remark
    (remark,) = build("llama3", high_freq_factor=32.0).remarks()
    assert remark.startswith("llama3: ramp=rotations with beta 32")


def test_a_wrapper_hands_on_what_its_inner_encodings_remark() -> None:
    inner = build("t5", max_distance=1001).remarks()
    layers = [{"name": "t5", "max_distance": 1001}, {"name": "none"}]
    assert build("layered", layers=layers).remarks() == inner


def test_t5_reaches_every_bucket_where_max_distance_is_the_training_length() -> None:
    encoding = build("t5", Shape(32, 4, 1, 128), max_distance=128)
    assert encoding.bucket(torch.arange(128)).unique().tolist() == list(range(32))


# -- FoPE -------------------------------------------------------------------------------------------------------------


def test_fope_without_its_draw_is_rope_on_the_pairs_that_come_round_in_training() -> None:
    shape = Shape(64, 4, 2, train_length=64)
    q, k = torch.randn(2, 2, 4, 40, 16)
    rope = build("rope", shape)
    every = rope.inv_freq(torch.device("cpu"))
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


# -- selective RoPE ---------------------------------------------------------------------------------------------------


def test_selective_rope_with_a_bias_alone_is_rope() -> None:
    encoding = build("selective_rope", bias=True)
    with torch.no_grad():
        encoding.up[0].weight.zero_()
    q, k, _, x = layer_inputs(40)
    rope = attention_logits(build("rope", base=500000.0), q, k)
    torch.testing.assert_close(attention_logits(encoding, q, k, x), rope, **FP32)


# -- Canon ------------------------------------------------------------------------------------------------------------


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


# -- FIRE -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("i", "j", "share"), [(1, 0, 0.0240981), (100, 50, 0.4530270), (100, 0, 0.6062818), (1000, 500, 0.8519441)]
)
def test_fire_worked_shares(i: int, j: int, share: float) -> None:
    encoding = build("fire", threshold=512)
    with torch.no_grad():  # a network that gives back its input
        for parameter in encoding.networks[0].parameters():
            parameter.zero_()
        encoding.networks[0][0].weight[0] = encoding.networks[0][2].weight[:, 0] = 1
    q, k, v, x = layer_inputs(2)
    _, q, k, _, layer = whole_block(encoding, q, k, v, make_layer(encoding, torch.tensor([[j, i]]), 0, x))
    assert encoding.bias(q, k, layer)[0, :, 1, 0].tolist() == pytest.approx([share] * SHAPE.n_heads, abs=1e-6)


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
    q, k, v, x = inputs
    _, q, k, _, layer = whole_block(encoding, q, k, v, make_layer(encoding, positions, 1, x))
    by_pieces = encoding.bias(q, k, layer)
    parameters = dict(encoding.named_parameters())
    by_network = oracle_of_fire.reference(parameters, SHAPE, {"threshold": 16.5}, *inputs, positions, 1, True)["bias"]
    torch.testing.assert_close(by_pieces, by_network, **FP32)
    upstream = torch.randn_like(by_pieces)
    leaves = [encoding.c, encoding.multiplier, *encoding.networks[1].parameters()]
    assert_gradients_equal((by_pieces * upstream).sum(), (by_network * upstream).sum(), leaves, rtol=1e-3)


# -- Selective RoPE ---------------------------------------------------------------------------------------------------


def test_selective_rope_starts_with_its_authors_small_weights_and_turns_hardly_anything() -> None:
    shape = Shape(128, 4, 3, 64)
    encoding = encodings.build("selective_rope", shape, {"gate": True})
    sizes = {"down.0.weight": (32, 128), "up.0.weight": (64, 32), "convolution.0.weight": (64, 1, 4)}
    for name, size in sizes.items():
        weight = encoding.get_parameter(name).detach()
        assert weight.shape == size and float(weight.mean().abs()) < 0.005
        assert float(weight.std()) == pytest.approx(0.02, rel=0.2)
    assert not encoding.get_parameter("gate.0.bias").any()
    q, k, x = torch.randn(1, 4, 64, 32), torch.randn(1, 4, 64, 32), torch.randn(1, 64, 128)
    with torch.no_grad():
        turned, _ = schemes.rotated_at(encoding, q, k, torch.arange(64)[None], x)
        larger = encodings.build("selective_rope", shape, {"start": "torch"})
        far, _ = schemes.rotated_at(larger, q, k, torch.arange(64)[None], x)
    assert float((turned - q).abs().max()) < 0.05 < float((far - q).abs().max())


# -- LieRE -------------------------------------------------------------------------------------------------------------


def test_liere_in_blocks_of_8_as_in_the_authors_scripts_turns_each_block_by_itself() -> None:
    encoding = build("liere", Shape(64, 2, 1, 16), block=8)
    assert encoding.above.shape == (1, 2, 4, 28) and encoding.above.min() >= 0 and encoding.above.max() <= 2 * math.pi
    q = torch.zeros(1, 2, 16, 32)
    q[..., 8:16] = torch.randn(1, 2, 16, 8)
    turned, _ = schemes.rotated_at(encoding, q, q, torch.arange(16)[None])
    assert not turned[..., :8].any() and not turned[..., 16:].any()
    torch.testing.assert_close(turned.norm(dim=-1), q.norm(dim=-1))
    with pytest.raises(OptionError, match=r"^encoding.block is 5 for 'liere': expected a divisor of the 32 channels"):
        build("liere", Shape(64, 2, 1, 16), block=5)


# -- PaTH -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["path", "path_fox"])
def test_path_starts_as_in_its_authors_models(name: str) -> None:
    # fla's PaTHAttentionPreTrainedModel: every Linear and Conv1d normal with deviation 0.02, biases 0.
    encoding = encodings.build(name, Shape(128, 4, 3, 64))
    for part in ("down", "up", "convolution", "beta"):
        weights = torch.cat([encoding.get_parameter(f"{part}.{layer}.weight").detach().flatten() for layer in range(3)])
        assert float(weights.std()) == pytest.approx(0.02, rel=0.1) and float(weights.mean().abs()) < 0.002
        assert weights.unique().numel() > 0.99 * weights.numel()
    assert not any(encoding.get_parameter(f"beta.{layer}.bias").any() for layer in range(3))
    assert encoding.silu  # its layer leaves the activation of fla's convolution at the default
    found = importlib.util.find_spec("fla")
    if found and found.origin:
        code = (Path(found.origin).parent / "modules/causal_conv1d/ops.py").read_text(encoding="utf-8")
        (layer,) = [node for node in ast.walk(ast.parse(code)) if getattr(node, "name", "") == "ShortConvolution"]
        assert "activation: str | None='silu'" in ast.unparse(layer)
    torch.manual_seed(0)
    former = encodings.build(name, Shape(128, 4, 3, 64), {"start": "torch"})
    torch.manual_seed(0)
    assert torch.equal(former.get_parameter("down.0.weight"), nn.Linear(128, 32, bias=False).weight)


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


def test_path_leaves_keys_after_the_query_alone() -> None:
    q, k, _, x = layer_inputs(20)
    after = torch.ones(20, 20, dtype=torch.bool).triu()
    actual = attention_logits(build("path"), q, k, x, causal=False)[..., after]
    torch.testing.assert_close(actual, attention_logits(build("none"), q, k, causal=False)[..., after], **FP32)


# -- stick-breaking ---------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("attend_current", [False, True])
def test_stick_breaking_is_a_walk_from_the_nearest_key_whose_rest_is_the_querys_own(attend_current: bool) -> None:
    q, k, v, _ = layer_inputs(12)
    ours = attention_output(build("stick_breaking", attend_current=attend_current), q, k, v)
    z = (q.double() @ k.double().mT) / math.sqrt(SHAPE.head_dim)
    for row in range(12):
        stick, expected = torch.ones(2, SHAPE.n_heads, 1, dtype=torch.float64), torch.zeros_like(v[:, :, 0].double())
        for key in range(row if attend_current else row - 1, -1, -1):
            share = torch.sigmoid(z[:, :, row, key, None])
            expected += stick * share * v[:, :, key]
            stick = stick * (1 - share)
        torch.testing.assert_close(ours[:, :, row], (expected + stick * v[:, :, row]).float(), **FP32)


def test_stick_breaking_stays_finite_where_logits_are_extreme() -> None:
    q, k, v, _ = layer_inputs(30)
    q, k = (100 * q).requires_grad_(), (100 * k).requires_grad_()
    out = attention_output(build("stick_breaking"), q, k, v)
    assert out.isfinite().all() and out.abs().max() <= v.abs().max() * (1 + 1e-5)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(out.sum(), (q, k)))
