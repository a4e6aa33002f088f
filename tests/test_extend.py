"""Context extension: frequencies against transformers, far pairs against plain loops,
and what must stay as it was.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from schemes import by_definition, layer_inputs
from schemes import layer_attention as attention
from support import encoded
from torch import Tensor

from posbench import encodings
from posbench.encodings.base import Shape
from posbench.encodings.extend import extend_encoding, methods, methods_of
from posbench.encodings.rope import SCALINGS, RoPE, Rotary
from posbench.errors import UserError
from posbench.model.gpt import build
from posbench.model.standalone import attention_logits, attention_output

L = 16  # training length of most tests
SHAPE = Shape(d_model=16, n_heads=2, n_layers=2, train_length=L)
FREQUENCY_RULES = [
    "pi",
    "ntk",
    "dynamic_ntk",
    "ntk_by_parts",
    "yarn",
    "llama3",
    "longrope",
    "abf",
    "clipped_rope",
]
FAR_PAIRS = ["rerope", "string", "leaky_rerope", "self_extend", "dual_chunk"]


def rope(head_dim: int = 8, base: float = 10_000.0, train_length: int = L) -> RoPE:
    width = 2 * head_dim
    shape = Shape(d_model=width, n_heads=2, n_layers=1, train_length=train_length)
    return RoPE(shape, base)


def extended(encoding: Any, method: str, length: int, **options: Any) -> Any:
    train_length = encoding.shape.train_length
    return extend_encoding(encoding, method, length, train_length, **options)[0]


def facts_of(encoding: Any, method: str, length: int, **options: Any) -> Any:
    train_length = encoding.shape.train_length
    return extend_encoding(encoding, method, length, train_length, **options)[1]


def spectrum(encoding: RoPE, method: str, length: int, **options: Any) -> Tensor:
    """Return the frequencies after an extension."""
    after = extended(encoding, method, length, **options)
    assert isinstance(after, Rotary)
    return after.inv_freq()


WITH_FACTOR = [name for name in SCALINGS if "factor" in encodings.options_of(name)]


@pytest.mark.parametrize("name", WITH_FACTOR)
@pytest.mark.parametrize("length", [L, 3 * L])
def test_the_encoding_of_a_scaling_is_rope_under_the_extension_of_that_name(
    length, name
):
    encoding: Any = encodings.build(name, rope(16).shape, {"factor": 2.5})
    extension = extended(rope(16), name, length, factor=2.5)
    positions = torch.arange(length)[None]
    tables = encoding.make_tables(positions)
    torch.testing.assert_close(
        tables, extension.make_tables(positions), rtol=1e-6, atol=0
    )


def test_clipped_rope_fades_slow_pairs_out_by_a_cosine() -> None:
    encoding = rope(32, train_length=64)
    before = encoding.inv_freq()
    wavelengths = 2 * math.pi / before
    assert int((wavelengths > 64).sum()) == 11  # pairs 5 to 15
    share = (torch.arange(16, dtype=torch.float64) - 5).clamp(min=0) / 10
    fading = 0.5 * (1 + (math.pi * share).cos())
    after = spectrum(encoding, "clipped_rope", 128)
    torch.testing.assert_close(after, before * fading)
    assert after[-1] == 0


def test_abf_is_rope_of_a_larger_base() -> None:
    larger = rope(base=500_000.0).inv_freq()
    torch.testing.assert_close(spectrum(rope(), "abf", 40), larger)


def test_facts_of_an_extension_are_its_options_and_the_frequencies_before_and_after():
    facts = facts_of(rope(8), "yarn", 4 * L)
    assert facts["inv_freq_before"] == [1.0, 0.1, 0.01, 0.001]
    assert facts["inv_freq_after"][-1] == 0.00025
    options = [facts[key] for key in ("factor", "dynamic", "ramp", "alpha", "beta")]
    assert options == [4, True, "index", 1, 32]
    assert facts["attention_factor"] == pytest.approx(1.138629)


def test_a_given_factor_holds_at_every_length() -> None:
    at_longest = facts_of(rope(8), "yarn", 4 * L)
    fixed = facts_of(rope(8), "yarn", L, factor=4)
    assert fixed["dynamic"] is False
    assert fixed["inv_freq_after"] == at_longest["inv_freq_after"]


Distance = Callable[[int, int], float]


def at_distances(q: Tensor, k: Tensor, distance: Distance) -> Tensor:
    """Return causal logits, RoPE's at `distance(i, j)` for pair (i, j), by complex
    numbers of channels (2p, 2p + 1).
    """
    length = q.shape[2]
    pairs = q.shape[3] // 2
    frequencies = 1e4 ** (-torch.arange(pairs).double() / pairs)
    turns = torch.zeros(length, length, pairs, dtype=torch.complex128)
    for i in range(length):
        for j in range(i + 1):
            turns[i, j] = torch.exp(1j * distance(i, j) * frequencies)
    of_q = torch.view_as_complex(q.double().unflatten(-1, (pairs, 2)))
    of_k = torch.view_as_complex(k.double().unflatten(-1, (pairs, 2)))
    products = torch.einsum("bhip,ijp,bhjp->bhij", of_q, turns, of_k.conj())
    logits = products.real.float() / math.sqrt(2 * pairs)
    later = torch.ones(length, length).triu(1).bool()
    return logits.masked_fill(later, -math.inf)


def rerope_distance(window: int) -> Distance:
    return lambda i, j: min(i - j, window)


def string_distance(shift: int, local: int) -> Distance:
    """Return the paper's equation 3."""

    def distance(i: int, j: int) -> int:
        return i - j - shift + local if j <= i - shift else i - j

    return distance


def leaky_distance(window: int, k: float) -> Distance:
    def distance(i: int, j: int) -> float:
        if i - j < window:
            return i - j
        return window + (i - j - window) / k

    return distance


def dual_chunk_distance(chunk: int, size: int) -> Distance:
    """Return the paper's equation 7, with w = c - s."""
    successive = [*range(size, chunk), *[chunk - 1] * size][:size]

    def distance(i: int, j: int) -> int:
        chunks_between = i // size - j // size
        of_query = chunk - 1
        if chunks_between == 0:
            of_query = i % size
        elif chunks_between == 1:
            of_query = successive[i % size]
        return of_query - j % size

    return distance


def self_extend_distance(window: int, group: int) -> Distance:
    def distance(i: int, j: int) -> int:
        if i - j < window:
            return i - j
        return i // group + window - window // group - j // group

    return distance


FAR_CASES: list[tuple[str, dict[str, Any], Distance]] = [
    ("rerope", {}, rerope_distance(4)),
    ("string", {"shift": 9, "local": 4}, string_distance(9, 4)),
    ("leaky_rerope", {}, leaky_distance(4, (40 - 1 - 4) / (16 - 1 - 4))),
    ("leaky_rerope", {"window": 7, "k": 2.5}, leaky_distance(7, 2.5)),
    ("self_extend", {"window": 6, "group": 3}, self_extend_distance(6, 3)),
    ("dual_chunk", {}, dual_chunk_distance(16, 12)),
    ("dual_chunk", {"chunk": 5}, dual_chunk_distance(16, 5)),
]


@pytest.mark.parametrize(("method", "options", "distance"), FAR_CASES)
def test_far_pairs_are_ropes_at_the_papers_distance(method, options, distance):
    after = extended(RoPE(SHAPE), method, 40, **options)
    q, k, *_ = layer_inputs(SHAPE, 40, batch=1)
    wanted = at_distances(q, k, distance)
    torch.testing.assert_close(
        attention_logits(after, q, k), wanted, atol=5e-6, rtol=5e-6
    )


@pytest.mark.parametrize("length", [17, 40, 256])
def test_self_extend_by_default_meets_no_distance_that_training_did_not(length):
    facts = facts_of(RoPE(SHAPE), "self_extend", length)
    distance = self_extend_distance(facts["window"], facts["group"])
    met = [distance(i, j) for i in range(length) for j in range(i + 1)]
    assert max(met) <= L - 1


@pytest.mark.parametrize("length", [17, 40, 256])
def test_self_extends_default_group_is_the_smallest_that_suffices(length):
    facts = facts_of(RoPE(SHAPE), "self_extend", length)
    smaller = max(1, facts["group"] - 1)
    distance = self_extend_distance(facts["window"], smaller)
    assert max(distance(length - 1, j) for j in range(length)) > L - 1


@pytest.mark.sample(3)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("method", FAR_PAIRS)
def test_far_pairs_in_blocks_of_rows_equal_the_whole(method, layout):
    after = extended(RoPE(SHAPE, layout=layout), method, 40)
    q, k, v, _ = layer_inputs(SHAPE, 40)
    # every sequence its own
    positions = torch.stack([torch.arange(40), torch.arange(40) + 3])
    whole = attention_output(after, q, k, v, positions=positions)
    parts = [attention(after, q, k, v, None, positions, 0)]
    for block in (1, 7, 40):
        inputs = (q, k, v, None)
        parts.append(by_definition(after, inputs, positions, 0, block=block))
    for part in parts:
        # fp32 sums in another order
        torch.testing.assert_close(part, whole, atol=2e-6, rtol=2e-6)


def test_a_stretched_table_keeps_its_ends_and_is_straight_between_its_rows():
    learned = encodings.build("learned", SHAPE)
    after = extended(learned, "interpolate", 61)
    code = after.embed(torch.zeros(1, 61, 16), torch.arange(61)[None])[0]
    table = learned.get_parameter("table")
    for position in range(61):  # four positions a row
        low, quarters = divmod(position, 4)
        high = min(low + 1, 15)
        wanted = torch.lerp(table[low], table[high], quarters / 4)
        torch.testing.assert_close(code[position], wanted)


def test_a_stretched_table_ends_at_its_length() -> None:
    learned = encodings.build("learned", SHAPE)
    after = extended(learned, "interpolate", 61)
    assert after.max_length == 61
    facts = facts_of(learned, "interpolate", 61)
    assert facts == {"factor": 61 / 16, "dynamic": True}
    with pytest.raises(UserError, match="62"):
        after.embed(torch.zeros(1, 62, 16), torch.arange(62)[None])


SQUEEZED: list[tuple[str, str, dict[str, Any]]] = [
    ("alibi", "alibi_pi", {}),
    ("fire", "interpolate", {}),
    ("t5", "interpolate", {"num_buckets": 8, "max_distance": 16}),
    ("sinusoidal", "interpolate", {"combine": "concat"}),
]


@pytest.mark.parametrize(("name", "method", "options"), SQUEEZED)
def test_what_is_squeezed_is_the_trained_one_at_divided_positions(
    name, method, options
):
    trained = encodings.build(name, SHAPE, options)
    after = extended(trained, method, 4 * L)
    q, k, _, x = layer_inputs(SHAPE, L)
    near = torch.arange(L)
    far = 4 * near
    stretched = attention_logits(after, q, k, x, positions=far, layer=1)
    wanted = attention_logits(trained, q, k, x, positions=near, layer=1)
    torch.testing.assert_close(stretched, wanted)
    x = x[..., : after.token_dim()]
    torch.testing.assert_close(after.embed(x, far[None]), trained.embed(x, near[None]))


@pytest.mark.parametrize(("name", "method", "options"), SQUEEZED)
def test_what_is_squeezed_does_not_use_the_trained_ones_cheap_form(
    name, method, options
):
    trained = encodings.build(name, SHAPE, options)
    after = extended(trained, method, 4 * L)
    q, k, v, x = layer_inputs(SHAPE, L)
    positions = torch.arange(L)[None]
    fast = attention(after, q, k, v, x, positions, 1, consecutive=True)
    whole = attention_output(after, q, k, v, x, layer=1)
    torch.testing.assert_close(fast, whole, atol=2e-6, rtol=2e-6)


OF_METHOD = {
    "alibi_pi": ["alibi", "learned_sinks"],
    "interpolate": ["learned", "t5", "fire", "shape"],
}
EXTENDED = [
    (name, method) for method in methods() for name in OF_METHOD.get(method, ["rope"])
]
EXTENDED += [
    (name, "yarn") for name in ("lerope", "decoupled_rope", "layered", "temperature")
]


@pytest.mark.parametrize(("name", "method"), EXTENDED)
@torch.inference_mode()
def test_an_extension_leaves_the_trained_model_as_it_was(name, method, tiny_config):
    options = {"inner": "alibi"} if name == "learned_sinks" else {}
    gpt = build(encoded(tiny_config, name, **options), 257).eval()
    trained = gpt.encoding
    ids = torch.randint(257, (2, 16))
    before = gpt(ids)
    gpt.encoding, facts = extend_encoding(trained, method, 40, 16)
    assert gpt(torch.randint(257, (2, 40))).isfinite().all()
    assert "dynamic" in facts
    gpt.encoding = trained
    assert torch.equal(before, gpt(ids))


@pytest.mark.parametrize(("name", "method"), EXTENDED)
def test_an_extension_shares_the_parameters(name, method, tiny_config):
    options = {"inner": "alibi"} if name == "learned_sinks" else {}
    trained = build(encoded(tiny_config, name, **options), 257).encoding
    after, _ = extend_encoding(trained, method, 40, 16)
    of_trained = {parameter.data_ptr() for parameter in trained.parameters()}
    assert {parameter.data_ptr() for parameter in after.parameters()} == of_trained


def test_a_scheme_has_the_methods_that_are_for_it():
    assert methods_of(RoPE(SHAPE)) == [*FREQUENCY_RULES, *FAR_PAIRS]
    assert methods_of(encodings.build("none", SHAPE)) == []


@pytest.mark.parametrize(
    ("name", "method", "options", "expected"),
    [
        ("alibi", "pi", {}, r"'alibi' has no extension 'pi': it supports alibi_pi"),
        ("rope", "longrope", {"long_factor": [1, 2]}, "expected 4 numbers"),
    ],
)
def test_what_a_scheme_cannot_do_is_refused(name, method, options, expected):
    with pytest.raises(UserError, match=expected):
        extend_encoding(encodings.build(name, SHAPE), method, 4 * L, L, **options)
