"""Context extension: frequencies against transformers, far pairs against plain loops, and what must stay as it was."""

import cmath
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import third_party
from schemes import by_definition
from schemes import layer_attention as attention
from torch import Tensor

from posbench import encodings
from posbench.config.schema import Config
from posbench.encodings.base import Encoding, Shape
from posbench.encodings.extend import extended, methods, methods_of
from posbench.encodings.rope import CPU, SCALINGS, RoPE, Rotary
from posbench.errors import UserError
from posbench.model.gpt import build
from posbench.model.standalone import attention_logits, attention_output

L = 16  # training length of most tests
SHAPE = Shape(d_model=16, n_heads=2, n_layers=2, train_length=L)
FREQUENCY_RULES = ["pi", "ntk", "dynamic_ntk", "ntk_by_parts", "yarn", "llama3", "longrope", "abf", "clipped_rope"]
FAR_PAIRS = ["rerope", "leaky_rerope", "self_extend", "dual_chunk"]


def rope(head_dim: int = 8, base: float = 10_000.0, train_length: int = L) -> RoPE:
    return RoPE(Shape(d_model=2 * head_dim, n_heads=2, n_layers=1, train_length=train_length), base)


def spectrum(encoding: RoPE, method: str, length: int, **options: Any) -> tuple[Tensor, float]:
    """Frequencies and attention factor after an extension."""
    after, _ = extended(encoding, method, length, encoding.shape.train_length, **options)
    assert isinstance(after, Rotary)
    return after.inv_freq(CPU), after.attention_factor


def inputs(length: int, shape: Shape = SHAPE, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, batch, shape.n_heads, length, shape.head_dim)
    return q, k, v


# -- frequency rules ---------------------------------------------------------------------------------------------------


def transformers_rule(
    kind: str, head_dim: int, base: float, train_length: int, length: int, **parameters: Any
) -> tuple[Tensor, float]:
    """Frequencies and attention factor as transformers computes them, in fp32."""
    config = third_party("transformers").LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        max_position_embeddings=train_length,
        rope_parameters={
            "rope_type": kind, "rope_theta": base, "original_max_position_embeddings": train_length, **parameters,
        },
    )  # fmt: skip
    rule = third_party("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS[kind]
    inv_freq, attention_factor = rule(config, CPU, seq_len=length)
    return inv_freq, attention_factor


# Method, type in transformers, its options beside the factor, and theirs; lists have a number for each of 64 pairs.
_LONG, _SHORT = [1 + 0.3 * pair for pair in range(64)], [1 + 0.01 * pair for pair in range(64)]
RULES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("pi", "linear", {}, {}),
    ("dynamic_ntk", "dynamic", {}, {}),
    ("yarn", "yarn", {}, {}),
    ("yarn", "yarn", {"alpha": 0.5, "beta": 4.0, "attention_factor": 1.1},
     {"beta_slow": 0.5, "beta_fast": 4.0, "attention_factor": 1.1}),
    ("llama3", "llama3", {}, {"low_freq_factor": 1.0, "high_freq_factor": 4.0}),
    ("longrope", "longrope", {"long_factor": _LONG, "short_factor": _SHORT},
     {"long_factor": _LONG, "short_factor": _SHORT}),
]  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.parametrize("factor", [1.0, 2.0, 5.5, 32.0])
@pytest.mark.parametrize("train_length", [64, 500, 8192])
@pytest.mark.parametrize(("head_dim", "base"), [(8, 1e4), (32, 1e4), (64, 5e5), (128, 1e4)])
@pytest.mark.parametrize(("method", "kind", "options", "theirs"), RULES)
def test_frequencies_are_those_of_transformers(
    method: str, kind: str, options: dict[str, Any], theirs: dict[str, Any], head_dim: int, base: float,
    train_length: int, factor: float,
) -> None:  # fmt: skip
    encoding = rope(head_dim, base, train_length)
    own, other = (
        {name: value[: head_dim // 2] if isinstance(value, list) else value for name, value in given.items()}
        for given in (options, theirs)
    )
    for reached in (train_length, train_length + 1, 3 * train_length):
        ours, ours_attention = spectrum(encoding, method, reached, factor=factor, **own)
        expected, attention_factor = transformers_rule(
            kind, head_dim, base, train_length, reached, factor=factor, **other
        )
        # They compute in fp32, relative error up to 1e-6 in the power; absolute 1e-6 beside it for frequencies near 1.
        torch.testing.assert_close(ours.float(), expected, atol=1e-6, rtol=1e-6)
        assert ours_attention == pytest.approx(attention_factor, rel=1e-12)


def test_worked_frequencies() -> None:
    def close(actual: Tensor, expected: list[float], tolerance: float = 1e-5) -> None:
        torch.testing.assert_close(actual.float(), torch.tensor(expected), rtol=tolerance, atol=0)

    close(spectrum(rope(16), "pi", 4 * L)[0][:2], [0.25, 0.0790569])
    ratio = spectrum(rope(128, train_length=4096), "ntk", 8 * 4096)[0][1]
    assert float(ratio) ** -64 == pytest.approx(82684.6226, rel=1e-6)  # the new base
    assert float(spectrum(rope(16), "ntk", 4 * L)[0][1]) ** -8 == pytest.approx(48760.5462, rel=1e-6)
    dynamic = spectrum(rope(16, train_length=64), "dynamic_ntk", 256, factor=2)[0]
    close(dynamic[:5], [1, 0.23948, 0.057351, 0.013735, 0.0032892], 5e-5)  # five digits given

    encoding = rope(128, train_length=4096)
    yarn, temperature = spectrum(encoding, "yarn", 16 * 4096)
    ratio = yarn / encoding.inv_freq(CPU)
    assert temperature == pytest.approx(1.27725887)
    close(ratio[[0, 20, 21, 30, 45, 46, 63]], [1, 1, 0.9639, 0.6394, 0.0986, 0.0625, 0.0625], 1e-3)  # four digits
    _, temperature = spectrum(rope(64, train_length=64), "yarn", 512)
    assert temperature == pytest.approx(1.20794415)

    encoding = rope(128, 5e5, 8192)
    llama = spectrum(encoding, "llama3", 8192, factor=8)[0] / encoding.inv_freq(CPU)
    close(
        llama[[0, 28, 29, 30, 31, 32, 33, 34, 35, 63]],
        [1, 1, 0.828168, 0.643743, 0.493507, 0.371122, 0.271425, 0.190211, 0.125, 0.125],
    )
    assert spectrum(rope(16, train_length=16), "longrope", 64)[1] == pytest.approx(1.22474487)  # sqrt(1.5)
    unsearched, known = (spectrum(rope(64, train_length=1024), name, 4096)[0] for name in ("longrope", "yarn"))
    torch.testing.assert_close(unsearched, known)  # without a search the divisors are YaRN's


@pytest.mark.parametrize("name", [name for name in SCALINGS if "factor" in encodings.options_of(name)])
@pytest.mark.parametrize("length", [20, L, 3 * L])
def test_the_encoding_of_a_scaling_is_rope_under_the_extension_of_that_name(length: int, name: str) -> None:
    encoding = encodings.build(name, rope(16).shape, {"factor": 2.5})
    positions = torch.arange(length)[None]
    extended_rope, _ = extended(rope(16), name, length, L, factor=2.5)
    torch.testing.assert_close(encoding.rotation(positions), extended_rope.rotation(positions), rtol=0, atol=0)


def test_the_rotations_ramp_counts_rotations_within_the_training_length() -> None:
    encoding = rope(64, train_length=1024)
    before = encoding.inv_freq(CPU)
    after = spectrum(encoding, "yarn", 4096, ramp="rotations", alpha=1, beta=32)[0]
    for f, g in zip(before.tolist(), after.tolist(), strict=True):
        rotations = 1024 * f / (2 * math.pi)
        kept = min(1.0, max(0.0, (rotations - 1) / 31))
        assert g == pytest.approx(kept * f + (1 - kept) * f / 4, rel=1e-12)


def test_clipped_rope_slows_the_pairs_that_training_never_turned_round() -> None:
    encoding = rope(32, train_length=64)
    before = encoding.inv_freq(CPU)
    after, facts = extended(encoding, "clipped_rope", 128, 64)
    slow = [2 * math.pi / f > 64 for f in before.tolist()]
    assert facts["pairs"] == sum(slow) == 11
    expected = [
        f * 0.5 * (1 + math.cos(math.pi * (pair - 5) / 10)) if pair >= 5 else f
        for pair, f in enumerate(before.tolist())
    ]
    assert isinstance(after, Rotary)
    clipped = after.inv_freq(CPU)
    torch.testing.assert_close(clipped, torch.tensor(expected, dtype=torch.float64))
    assert float(clipped[-1]) == 0 and float(clipped[5]) == float(before[5])
    assert torch.equal(spectrum(encoding, "clipped_rope", 128, pairs=0)[0], before)


def test_abf_is_rope_with_a_larger_base_and_dynamic_ntk_of_factor_1_is_ntk() -> None:
    after, facts = extended(rope(), "abf", 40, L)
    assert torch.equal(after.inv_freq(CPU), rope(base=500_000.0).inv_freq(CPU)) and facts["base"] == 500_000
    for head_dim in (4, 16, 128):
        before, after = rope(head_dim).inv_freq(CPU), spectrum(rope(head_dim), "ntk", 7 * L)[0]
        assert float(after[0]) == 1 and float(before[-1] / after[-1]) == pytest.approx(7, rel=1e-12)
        assert torch.equal(after, spectrum(rope(head_dim), "dynamic_ntk", 7 * L)[0])


def test_yarns_temperature_multiplies_logits_by_its_square() -> None:
    q, k, _ = inputs(40)
    yarn, facts = extended(RoPE(SHAPE), "yarn", 64, L)
    parts, _ = extended(RoPE(SHAPE), "ntk_by_parts", 64, L)
    ratio = facts["attention_factor"] ** 2
    assert ratio == pytest.approx((0.1 * math.log(4) + 1) ** 2)
    torch.testing.assert_close(attention_logits(yarn, q, k), ratio * attention_logits(parts, q, k))


# -- nothing to extend is plain rope -----------------------------------------------------------------------------------

NOT_EXTENDED: list[tuple[str, int, dict[str, Any]]] = [
    *((name, L, {}) for name in FREQUENCY_RULES if name not in ("abf", "clipped_rope")),  # they know no factor
    *((name, 3 * L, {"factor": 1.0}) for name in ("pi", "ntk", "ntk_by_parts", "yarn", "llama3", "longrope")),
    ("abf", 3 * L, {"base": 10_000.0}),
    ("clipped_rope", 3 * L, {"pairs": 0}),
    ("rerope", 3 * L, {"window": 3 * L}),
    ("leaky_rerope", 3 * L, {"k": 1.0}),
    ("leaky_rerope", 3 * L, {"window": 3 * L, "k": 7.0}),
    ("leaky_rerope", L, {}),
    ("self_extend", 3 * L, {"group": 1}),
    ("self_extend", 3 * L, {"window": 3 * L, "group": 4}),
    ("self_extend", L, {}),
    ("dual_chunk", L, {}),
]


@pytest.mark.parametrize(("method", "length", "options"), NOT_EXTENDED)
def test_an_extension_by_nothing_is_plain_rope(method: str, length: int, options: dict[str, Any]) -> None:
    encoding = RoPE(SHAPE)
    after, _ = extended(encoding, method, length, L, **options)
    q, k, _ = inputs(length)
    torch.testing.assert_close(attention_logits(after, q, k), attention_logits(encoding, q, k), atol=2e-6, rtol=2e-6)


# -- far pairs, against plain loops ------------------------------------------------------------------------------------


def rope_score(q: list[float], k: list[float], distance: float, base: float = 10_000.0) -> float:
    """q turned by `distance` against an unturned k, pairs (2p, 2p + 1) as complex numbers; scaled."""
    pairs = len(q) // 2
    total = 0.0
    for p in range(pairs):
        turned = complex(q[2 * p], q[2 * p + 1]) * cmath.exp(1j * distance * base ** (-p / pairs))
        total += (turned * complex(k[2 * p], k[2 * p + 1]).conjugate()).real
    return total / math.sqrt(len(q))


def by_loops(q: Tensor, k: Tensor, distance: Callable[[int, int], float]) -> Tensor:
    """Causal logits of which pair (i, j) is rope's at `distance(i, j)`."""
    out = torch.full((*q.shape[:3], q.shape[2]), -math.inf)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            queries, keys = q[b, h].double().tolist(), k[b, h].double().tolist()
            for i in range(len(queries)):
                for j in range(i + 1):
                    out[b, h, i, j] = rope_score(queries[i], keys[j], distance(i, j))
    return out


def leaky_distance(w: int, slow: float) -> Callable[[int, int], float]:
    return lambda i, j: i - j if i - j < w else w + (i - j - w) / slow


def self_extend_distance(w: int, group: int) -> Callable[[int, int], float]:
    return lambda i, j: i - j if i - j < w else (i // group + w - w // group) - j // group


def dual_chunk_distance(c: int, s: int) -> Callable[[int, int], float]:
    successive = [*range(s, s + (c - s)), *[c - 1] * (s - (c - s))][:s]  # the paper's equation 7, w = c - s
    return lambda i, j: [i % s, successive[i % s], c - 1][min(i // s - j // s, 2)] - j % s


FAR_CASES: list[tuple[str, dict[str, Any], Callable[[int, int], float]]] = [
    ("rerope", {}, lambda i, j: min(i - j, 4)),
    ("rerope", {"window": 9}, lambda i, j: min(i - j, 9)),
    ("leaky_rerope", {}, leaky_distance(4, (40 - 1 - 4) / (16 - 1 - 4))),
    ("leaky_rerope", {"window": 7, "k": 2.5}, leaky_distance(7, 2.5)),
    ("self_extend", {"window": 6, "group": 3}, self_extend_distance(6, 3)),
    ("self_extend", {"window": 5, "group": 4}, self_extend_distance(5, 4)),
    ("dual_chunk", {}, dual_chunk_distance(16, 12)),
    ("dual_chunk", {"chunk": 5}, dual_chunk_distance(16, 5)),
    ("dual_chunk", {"chunk": 16}, dual_chunk_distance(16, 16)),
]


@pytest.mark.parametrize(("method", "options", "distance"), FAR_CASES)
def test_far_pairs_are_ropes_at_the_papers_distance(
    method: str, options: dict[str, Any], distance: Callable[[int, int], float]
) -> None:
    after, _ = extended(RoPE(SHAPE), method, 40, L, **options)
    q, k, _ = inputs(40, batch=1)
    torch.testing.assert_close(attention_logits(after, q, k), by_loops(q, k, distance), atol=5e-6, rtol=5e-6)


def test_dual_chunk_positions_are_those_of_the_papers_figure() -> None:
    distance = dual_chunk_distance(c=10, s=6)  # queries of the second chunk against the first: 6 7 8 9 9 9 - (0 .. 5)
    rows = [[int(distance(i, j)) for j in range(6)] for i in range(6, 12)]
    assert rows == [[start - j for j in range(6)] for start in (6, 7, 8, 9, 9, 9)]


@pytest.mark.parametrize("length", [17, 24, 40, 64, 256])
def test_dynamic_far_pairs_meet_no_distance_that_training_did_not(length: int) -> None:
    _, leaky = extended(RoPE(SHAPE), "leaky_rerope", length, L)
    _, grouped = extended(RoPE(SHAPE), "self_extend", length, L)
    far = leaky_distance(leaky["window"], leaky["k"])
    assert far(length - 1, 0) == pytest.approx(L - 1)
    far = self_extend_distance(grouped["window"], grouped["group"])
    assert max(far(i, j) for i in range(length) for j in range(i + 1)) <= L - 1
    if (size := grouped["group"]) > 1:  # it is the smallest that suffices
        far = self_extend_distance(grouped["window"], size - 1)
        assert max(far(length - 1, j) for j in range(length)) > L - 1


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("method", FAR_PAIRS)
def test_far_pairs_in_blocks_of_rows_equal_the_whole(method: str, layout: Any) -> None:
    after, _ = extended(RoPE(SHAPE, layout=layout), method, 40, L)
    q, k, v = inputs(40)
    positions = torch.stack([torch.arange(40), torch.arange(40) + 3])  # every sequence its own
    whole = attention_output(after, q, k, v, positions=positions)
    for block in (1, 7, 40):
        out = by_definition(after, (q, k, v, None), positions, 0, block=block)
        torch.testing.assert_close(out, whole, atol=2e-6, rtol=2e-6)  # fp32 sums in another order
    torch.testing.assert_close(attention(after, q, k, v, None, positions, 0), whole, atol=2e-6, rtol=2e-6)


# -- other schemes -----------------------------------------------------------------------------------------------------


def test_a_stretched_table_keeps_its_ends_and_is_straight_between_its_rows() -> None:
    learned = encodings.build("learned", SHAPE)
    after, facts = extended(learned, "interpolate", 4 * L, L)
    assert facts == {"factor": 4.0, "dynamic": True} and after.max_length == 4 * L
    code = after.embed(torch.zeros(1, 4 * L, 16), torch.arange(4 * L)[None])[0]
    table = learned.get_parameter("table")
    torch.testing.assert_close(code[[0, -1]], table[[0, -1]], atol=1e-6, rtol=1e-6)
    expected = torch.nn.functional.interpolate(table.T[None], size=4 * L, mode="linear", align_corners=True)[0].T
    torch.testing.assert_close(code, expected, atol=1e-5, rtol=1e-5)  # torch finds the place in fp32
    with pytest.raises(UserError, match="65"):
        after.embed(torch.zeros(1, 4 * L + 1, 16), torch.arange(4 * L + 1)[None])
    same, _ = extended(learned, "interpolate", L, L)
    x, positions = torch.randn(2, L, 16), torch.arange(L)[None]
    assert torch.equal(same.embed(x, positions), learned.embed(x, positions))


@pytest.mark.parametrize(
    ("name", "method", "options"),
    [("alibi", "alibi_pi", {}), ("fire", "interpolate", {}), ("t5", "interpolate", {"num_buckets": 8})],
)
def test_a_squeezed_bias_is_the_trained_one_at_divided_positions(
    name: str, method: str, options: dict[str, Any]
) -> None:
    trained = encodings.build(name, SHAPE, options | ({"max_distance": 16} if name == "t5" else {}))
    after, _ = extended(trained, method, 4 * L, L)
    q, k, v = inputs(L)
    positions = torch.arange(L)
    stretched = attention_logits(after, q, k, positions=4 * positions, layer=1)
    torch.testing.assert_close(stretched, attention_logits(trained, q, k, positions=positions, layer=1))
    fast = attention(after, q, k, v, None, positions[None], 1, consecutive=True)  # not by the trained one's cheap form
    torch.testing.assert_close(fast, attention_output(after, q, k, v, layer=1), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("combine", ["add", "concat"])
def test_sinusoidal_interpolation_is_the_code_at_divided_positions(combine: str) -> None:
    sinusoidal = encodings.build("sinusoidal", SHAPE, {"combine": combine})
    after, _ = extended(sinusoidal, "interpolate", 4 * L, L)
    x = torch.randn(2, L, after.token_dim())
    positions = torch.arange(L)[None]
    torch.testing.assert_close(after.embed(x, 4 * positions), sinusoidal.embed(x, positions))


# -- what holds for every method ---------------------------------------------------------------------------------------

EVERY = [(name, method) for name in encodings.names() for method in methods_of(encodings.build(name, SHAPE))]


@pytest.mark.sample(8)
@pytest.mark.parametrize(("name", "method"), EVERY)
def test_an_extension_shares_the_parameters_and_leaves_the_trained_model_as_it_was(
    name: str, method: str, tiny_config: Config
) -> None:
    config = dataclasses.replace(tiny_config, encoding=dataclasses.replace(tiny_config.encoding, name=name))
    gpt = build(config, 257).eval()
    trained = gpt.encoding
    ids = torch.randint(257, (2, 16))
    far = torch.randint(257, (2, 40))
    state = {key: value.clone() for key, value in trained.state_dict().items()}
    with torch.inference_mode():
        before = gpt(ids)
        gpt.encoding, facts = extended(trained, method, 40, 16)
        reached = gpt(far)
        pointers = {p.data_ptr() for p in gpt.encoding.parameters()}
        gpt.encoding = trained
        after = gpt(ids)
    assert reached.isfinite().all() and reached.shape[:2] == (2, 40)
    assert pointers == {p.data_ptr() for p in trained.parameters()}
    assert torch.equal(before, after)
    assert trained.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in trained.state_dict().items())
    assert set(facts) >= {"dynamic"}


def test_every_method_has_a_title_a_source_and_a_scheme_and_schemes_name_no_other() -> None:
    for name, method in methods().items():
        assert 20 < len(method.title) < 120 and "\n" not in method.title, name
        assert len(method.source) > 20, name
    assert {method for _, method in EVERY} == methods().keys()
    assert methods_of(RoPE(SHAPE)) == [*FREQUENCY_RULES, *FAR_PAIRS]
    assert methods_of(encodings.build("none", SHAPE)) == []


def test_rows_learn_the_frequencies_before_and_after() -> None:
    _, facts = extended(rope(8), "yarn", 4 * L, L, ramp="index")
    assert facts["inv_freq_before"] == [1.0, 0.1, 0.01, 0.001]
    assert facts["inv_freq_after"][-1] == 0.00025
    assert facts["factor"] == 4 and facts["dynamic"] is True and facts["ramp"] == "index"
    assert facts["alpha"] == 1 and facts["beta"] == 32 and facts["attention_factor"] == pytest.approx(1.138629)
    _, fixed = extended(rope(8), "yarn", L, L, factor=4)
    assert fixed["dynamic"] is False and fixed["inv_freq_after"] == facts["inv_freq_after"]


def test_a_length_below_that_of_training_is_not_stretched() -> None:
    for method in ("pi", "ntk", "dynamic_ntk", "yarn"):
        _, facts = extended(rope(8), method, L // 2, L)
        assert facts["factor"] == 1 and facts["inv_freq_after"] == facts["inv_freq_before"]


def test_the_models_number_format_does_not_reach_the_frequencies() -> None:
    after, _ = extended(rope(8), "yarn", 4 * L, L)
    assert isinstance(after, Rotary)
    before = after.inv_freq(CPU).clone()
    assert torch.equal(after.to(torch.bfloat16).inv_freq(CPU), before)


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "method", "options", "expected"),
    [
        ("rope", "yran", {}, r"unknown extension 'yran': did you mean 'yarn'"),
        ("learned", "yarn", {}, r"'learned' has no extension 'yarn': it supports interpolate"),
        ("alibi", "pi", {}, r"'alibi' has no extension 'pi': it supports alibi_pi"),
        ("cope", "pi", {}, r"'cope' has no extension 'pi': it supports none"),
        ("rope", "interpolate", {}, r"'rope' has no extension 'interpolate': it supports pi, ntk, "),
        ("rope", "yarn", {"bta": 4}, r"'yarn' has no option 'bta': it accepts .*; did you mean 'beta'\?"),
        ("rope", "rerope", {"factor": 4}, r"'rerope' has no option 'factor': it accepts window"),
        ("rope", "pi", {"factor": 0.5}, r"factor is 0.5 for 'pi': .* greater than or equal to 1 \(default None\)"),
        ("rope", "pi", {"factor": math.inf}, r"factor is inf for .pi.: input should be a finite number"),
        ("rope", "pi", {"factor": "four"}, r"factor is 'four' for 'pi': .*number.* \(default None\)"),
        ("rope", "yarn", {"ramp": "cosine"}, r"ramp is 'cosine' for 'yarn': .*'index' or 'rotations'"),
        ("rope", "yarn", {"alpha": 32, "beta": 1}, r"extension option beta is 1: expected a number above alpha, 32"),
        ("rope", "yarn", {"attention_factor": 0}, r"attention_factor is 0 for 'yarn': .* greater than 0"),
        ("rope", "longrope", {"long_factor": [1, 2]}, r"long_factor is \[1.0, 2.0\]: expected 4 numbers"),
        ("rope", "abf", {"base": 1}, r"base is 1 for 'abf': .* greater than 1"),
        ("rope", "clipped_rope", {"pairs": 9}, r"pairs is 9: expected a number of pairs from 0 to 4"),
        ("rope", "rerope", {"window": 0}, r"window is 0 for 'rerope': .* greater than or equal to 1"),
        ("rope", "leaky_rerope", {"window": 15}, r"window is 15: expected less than 15, or k given"),
        ("rope", "leaky_rerope", {"k": 0.5}, r"k is 0.5 for 'leaky_rerope': .* greater than or equal to 1"),
        ("rope", "self_extend", {"window": 16}, r"window is 16: expected less than 16, or group given"),
        ("rope", "self_extend", {"group": 0}, r"group is 0 for 'self_extend': .* greater than or equal to 1"),
        ("rope", "dual_chunk", {"chunk": 17}, r"chunk is 17: expected from 1 to the training length 16"),
    ],
)
def test_a_wrong_choice_is_refused_in_one_line(name: str, method: str, options: dict[str, Any], expected: str) -> None:
    encoding: Encoding = encodings.build(name, SHAPE)
    with pytest.raises(UserError, match=expected) as error:
        extended(encoding, method, 4 * L, L, **options)
    assert "\n" not in str(error.value)
