"""One scheme is another in a limit, and invariants that no oracle states: checks of the schemes against each other."""

import math
from typing import Any

import pytest
import schemes
import torch
from torch import Tensor

from posbench import encodings
from posbench.encodings import _rotary as rotary
from posbench.encodings.alibi import default_slopes
from posbench.encodings.base import Shape
from posbench.encodings.rope import RoPE
from posbench.model.standalone import attention_logits, attention_output


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rope_scores_depend_on_distance_alone_a_million_tokens_out(layout: rotary.Layout) -> None:
    rope = RoPE(Shape(64, 1, 1, 64), layout=layout)
    q, k = torch.randn(2, 1, 1, 1, 64)

    def turned(x: Tensor, position: int) -> Tensor:
        return schemes.rotated_at(rope, x, x, torch.tensor([[position]]))[0]

    def score(m: int, n: int) -> float:
        return float((turned(q, m) * turned(k, n)).sum())

    for shift in (1, 100, 1_000_000):  # angles built in fp32 are off by 0.06 there
        assert math.isclose(score(10, 7), score(10 + shift, 7 + shift), abs_tol=1e-4)
    assert not math.isclose(score(10, 7), score(7, 10), abs_tol=1e-2)  # and order is visible


def test_rope_in_bf16_is_rope_in_fp32_rounded_once() -> None:
    for layout in ("half", "interleaved"):
        rope = encodings.build("rope", Shape(64, 1, 1, 64), {"layout": layout})
        x = torch.randn(1, 1, 9, 64).bfloat16()
        positions = torch.arange(9)[None] + 10_000
        out = schemes.rotated_at(rope, x, x, positions)[0]
        assert torch.equal(out, schemes.rotated_at(rope, x.float(), x.float(), positions)[0].bfloat16())


def test_alibi_gives_every_head_its_own_slope_whatever_their_number() -> None:
    for heads in range(1, 65):
        slopes = default_slopes(heads)
        assert len(set(slopes)) == heads and all(0 < slope < 1 for slope in slopes)


def test_kerple_power_with_exponent_1_is_alibi() -> None:
    shape = Shape(24, 3, 2, 32)
    slopes = [0.5, 0.0625, 0.015625]
    kerple = encodings.build("kerple_power", shape)
    with torch.no_grad():
        kerple.get_parameter("r1").copy_(torch.tensor(slopes))
        kerple.get_parameter("r2").fill_(1.0)
    q, k = torch.randn(2, 2, 3, 40, 8)
    alibi = encodings.build("alibi", shape, {"slopes": slopes})
    torch.testing.assert_close(attention_logits(kerple, q, k, layer=1), attention_logits(alibi, q, k))


@pytest.mark.parametrize(
    ("name", "r1", "r2", "expected"),  # at distances 0, 1, 4 and 10
    [
        ("kerple_log", 2.0, 0.5, [0.0, -0.8109302, -2.1972246, -3.5835189]),
        ("kerple_power", 0.5, 1.5, [0.0, -0.5, -4.0, -15.8113883]),
        ("kerple_log", -3.0, 0.5, [0.0, -0.0040547, -0.0109861, -0.0179176]),  # r1 counts as 0.01
        ("kerple_power", 0.5, 7.0, [0.0, -0.5, -8.0, -50.0]),  # r2 counts as 2
    ],
)
def test_kerple_penalises_as_in_worked_examples(name: str, r1: float, r2: float, expected: list[float]) -> None:
    kerple = encodings.build(name, Shape(8, 1, 1, 32))
    with torch.no_grad():
        kerple.get_parameter("r1").fill_(r1)
        kerple.get_parameter("r2").fill_(r2)
    bias = kerple.distance_bias(torch.tensor([0, 1, 4, 10]), 0)
    torch.testing.assert_close(bias, torch.tensor([expected]), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("gate", "share"), [("key", 1), ("query", 1), ("both", 2)])
def test_grape_a_whose_gates_see_nothing_is_alibi_at_ln_2_of_its_slopes(gate: str, share: int) -> None:
    shape = Shape(24, 3, 2, 32)
    slopes = [share * math.log(2) * slope for slope in default_slopes(3)]
    nothing = torch.zeros(1, 3, 20, 8)
    ours = attention_logits(encodings.build("grape_a", shape, {"gate": gate}), nothing, nothing, layer=1)
    theirs = attention_logits(encodings.build("alibi", shape, {"slopes": slopes}), nothing, nothing)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("name", "terms"), [("transformer_xl", 1), ("tupe", 2), ("deberta", 3)])
def test_without_its_position_terms_a_scheme_is_none_at_its_own_scale(name: str, terms: int) -> None:
    shape = Shape(16, 2, 1, 32)
    encoding = encodings.build(name, shape)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.zero_()
    q, k = torch.randn(2, 1, 2, 20, 8)
    plain = attention_logits(encodings.build("none", shape), q / math.sqrt(terms), k)
    torch.testing.assert_close(attention_logits(encoding, q, k), plain)


def test_transformer_xl_depends_on_distance_alone_a_million_tokens_out() -> None:
    encoding = schemes.build("transformer_xl", {}, Shape(16, 2, 1, 32))
    q, k = torch.randn(2, 1, 2, 20, 8)
    near, far = (attention_logits(encoding, q, k, positions=torch.arange(20) + start) for start in (0, 1_000_000))
    torch.testing.assert_close(far, near, atol=1e-4, rtol=0)  # angles built in fp32 are off by 0.06 there


def test_debertas_buckets_are_distances_up_to_half_of_them_and_shared_beyond() -> None:
    bucketed: Any = encodings.build("deberta", Shape(16, 2, 1, 512), {"num_buckets": 256})
    found = bucketed.bucket(torch.tensor([-600, -129, 0, 1, 128, 129, 200, 300, 511, 600]))
    assert found.tolist() == [-270, -129, 0, 1, 128, 129, 169, 207, 255, 270]
    plain: Any = encodings.build("deberta", Shape(16, 2, 1, 32), {"max_distance": 8})
    bucketed = encodings.build("deberta", Shape(16, 2, 1, 32), {"max_distance": 20, "num_buckets": 8})
    bucketed.load_state_dict(plain.state_dict())
    q, k = torch.randn(2, 1, 2, 5, 8)  # distances up to 4, half of the buckets
    torch.testing.assert_close(attention_logits(bucketed, q, k), attention_logits(plain, q, k), atol=0, rtol=0)


def test_scale_token_keeps_the_papers_ratio_to_the_token_embeddings() -> None:
    for token_rms in (0.02, 0.05):
        shape = Shape(64, 4, 1, 64, token_rms=token_rms)
        code = encodings.build("sinusoidal", shape).embed(torch.zeros(1, 64, 64), torch.arange(64)[None])
        assert float(code.pow(2).mean().sqrt()) == pytest.approx(token_rms * math.sqrt(0.5), rel=1e-5)


@pytest.mark.parametrize("name", ["index", "minmax", "binary", "sine", "sinusoidal"])
def test_concatenation_keeps_the_models_width_and_leaves_the_tokens_alone(name: str) -> None:
    encoding = encodings.build(name, Shape(64, 4, 1, 64), {"combine": "concat"})
    width = encoding.token_dim()
    x = torch.randn(2, 7, width)
    out = encoding.embed(x, torch.arange(7)[None])
    assert width < 64 and out.shape == (2, 7, 64)
    assert torch.equal(out[..., :width], x)


ROTARY_LIMITS: list[tuple[str, dict[str, object], str]] = [
    ("pi", {"factor": 1.0}, "rope"),
    ("ntk", {"factor": 1.0}, "rope"),
    ("yarn", {"factor": 1.0}, "rope"),
    ("llama3", {"factor": 1.0}, "rope"),
    ("longrope", {"factor": 1.0}, "rope"),
    ("ntk_by_parts", {"factor": 1.0}, "rope"),
    ("dynamic_ntk", {"original_length": 40}, "rope"),
    ("partial_rope", {"fraction": 1.0}, "rope"),
    ("p_rope", {"fraction": 1.0}, "rope"),
    ("partial_rope", {"fraction": 0.0}, "none"),
    ("p_rope", {"fraction": 0.0}, "none"),
    ("xpos", {"scale_base": 1e9}, "rope"),
    ("lerope", {}, "rope"),
    ("grape_m", {}, "rope"),
    ("carope", {}, "rope"),
    ("decoupled_rope", {"placement": "trailing", "turning": 16}, "rope"),
]


@pytest.mark.parametrize(("name", "options", "limit"), ROTARY_LIMITS)
def test_a_rotary_variant_that_changes_nothing_is_rope_and_one_that_turns_nothing_is_none(
    name: str, options: dict[str, object], limit: str
) -> None:
    shape = Shape(32, 2, 1, 16)
    q, k = torch.randn(2, 2, 2, 40, 16)
    x = torch.randn(2, 40, 32)
    ours = attention_logits(encodings.build(name, shape, options), q, k, x)
    theirs = attention_logits(encodings.build(limit, shape), q, k)
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(("train_length", "turning"), [(6, 0), (7, 1), (64, 9), (512, 16)])
def test_hope_is_p_rope_of_the_pairs_that_come_round_within_the_training_length(
    train_length: int, turning: int
) -> None:
    shape = Shape(64, 1, 1, train_length)
    q, k = torch.randn(2, 1, 1, 30, 64)
    ours = attention_logits(encodings.build("hope", shape), q, k)
    p_rope = encodings.build("p_rope", shape, {"fraction": turning / 32})
    assert torch.equal(ours, attention_logits(p_rope, q, k))


def test_comrope_is_rope_in_blocks_of_two_with_its_frequencies_and_liere_in_one_block() -> None:
    shape = Shape(16, 2, 2, 32)
    q, k = torch.randn(2, 1, 2, 100, 8)
    pairs, whole = encodings.build("comrope", shape), encodings.build("comrope", shape, {"block": 8})
    with torch.no_grad():  # above the diagonal, where RoPE has -sin
        pairs.get_parameter("above").copy_(-32 * 10000.0 ** -torch.arange(0, 1, 0.25)[:, None])
    rope = encodings.build("rope", shape)
    ours, theirs = attention_logits(pairs, q, k, layer=1), attention_logits(rope, q, k, layer=1)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    liere = encodings.build("liere", shape)
    liere.load_state_dict(whole.state_dict())
    assert torch.equal(attention_logits(whole, q, k, layer=1), attention_logits(liere, q, k, layer=1))


def test_bam_starts_as_alibi_and_its_ssmax_scales_whole_logits_by_the_logarithm_of_keys() -> None:
    shape = Shape(16, 2, 2, 32)
    q, k = torch.randn(2, 1, 2, 100, 8)
    alibi = attention_logits(encodings.build("alibi", shape), q, k)
    plain, sharp = (encodings.build("bam", shape, {"ssmax": ssmax}) for ssmax in (False, True))
    torch.testing.assert_close(attention_logits(plain, q, k, layer=1), alibi, atol=2e-5, rtol=1e-5)
    seen = torch.arange(1, 101).log()[:, None]
    expected = (alibi * seen).masked_fill(alibi.isinf(), -math.inf)
    torch.testing.assert_close(attention_logits(sharp, q, k, layer=1), expected, atol=1e-4, rtol=1e-5)


def test_algebraic_starts_as_rope_in_every_layer_and_logits_fall_by_its_decay_per_token() -> None:
    shape = Shape(16, 2, 3, 32)
    q, k = torch.randn(2, 1, 2, 100, 8)
    rope = attention_logits(encodings.build("rope", shape, {"base": 500.0}), q, k)
    index = torch.arange(100)
    distance = (index[:, None] - index).clamp(min=0)
    for layer, decay in ((0, 1.0), (2, 0.9)):
        encoding = encodings.build("algebraic", shape, {"base": 500.0, "decay": decay})
        ours = attention_logits(encoding, q, k, layer=layer)
        torch.testing.assert_close(ours, rope * decay**distance, atol=1e-5, rtol=1e-5)


def test_dape_v2_with_a_kernel_of_one_key_is_dape() -> None:
    shape = Shape(16, 2, 1, 32)
    narrow, dape = encodings.build("dape_v2", shape, {"kernel": 1}), encodings.build("dape", shape)
    dape.load_state_dict({name: value.squeeze() for name, value in narrow.state_dict().items()})
    q, k = torch.randn(2, 1, 2, 20, 8)
    torch.testing.assert_close(attention_logits(narrow, q, k), attention_logits(dape, q, k))


def test_xpos_shrinks_each_pair_at_its_own_pace_and_stays_within_fp32_to_its_end() -> None:
    shape = Shape(16, 2, 1, 16)
    xpos = encodings.build("xpos", shape)
    assert xpos.max_length == 128 * 8
    q = torch.zeros(1, 2, 1024, 8)
    q[..., 6:] = 1  # the slowest pair: it turns by 1e-3 per position and decays by zeta = 1.15 / 1.4 per B
    logits = attention_logits(xpos, q, q)[0, 0] * math.sqrt(8)
    for distance in (0, 8, 100):
        expected = 2 * math.cos(distance * 1e-3) * (1.15 / 1.4) ** (distance / 8)
        assert float(logits[900, 900 - distance]) == pytest.approx(expected, rel=1e-4)
    q, k, v = torch.randn(3, 1, 2, 1024, 8)
    assert attention_output(xpos, q, k, v).isfinite().all()
