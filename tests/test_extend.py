"""Context extension: frequencies against transformers, far pairs against plain loops,
and what must stay as it was.
"""

import math
from collections.abc import Callable

import pytest
import torch
from schemes import by_definition, layer_inputs
from schemes import layer_attention as attention
from support import encoded
from torch import Tensor
from torch.testing import assert_close

from posbench import encodings
from posbench.encodings.base import Shape
from posbench.encodings.extend import extend_encoding, methods, methods_of
from posbench.encodings.rope import SCALINGS, RoPE
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
FAR_PAIRS = [
    "rerope",
    "string",
    "leaky_rerope",
    "self_extend",
    "dual_chunk",
    "jet_long",
    "lampe",
]


def rope(head_dim=8, base=10_000.0, train_length=L):
    width = 2 * head_dim
    shape = Shape(width, n_heads=2, n_layers=1, train_length=train_length)
    return RoPE(shape, base)


def extended(encoding, method, length, **options):
    train_length = encoding.shape.train_length
    after, _ = extend_encoding(encoding, method, length, train_length, **options)
    return after


def facts_of(encoding, method, length, **options):
    train_length = encoding.shape.train_length
    _, facts = extend_encoding(encoding, method, length, train_length, **options)
    return facts


WITH_FACTOR = [name for name in SCALINGS if "factor" in encodings.options_of(name)]


@pytest.mark.parametrize("name", WITH_FACTOR)
@pytest.mark.parametrize("length", [L, 3 * L])
def test_the_encoding_of_a_scaling_is_rope_under_the_extension_of_that_name(
    length, name
):
    trained = rope(16)
    encoding = encodings.build(name, trained.shape, {"factor": 2.5})
    extension = extended(trained, name, length, factor=2.5)

    positions = torch.arange(length)[None]
    tables = encoding.make_tables(positions)
    wanted = extension.make_tables(positions)

    assert_close(tables, wanted, rtol=1e-6, atol=0)


def test_clipped_rope_fades_slow_pairs_out_by_a_cosine():
    encoding = rope(32, train_length=64)
    before = encoding.inv_freq()
    wavelengths = 2 * math.pi / before
    is_slow = wavelengths > 64
    assert is_slow.sum() == 11  # pairs 5 to 15

    after = extended(encoding, "clipped_rope", 128).inv_freq()

    pairs = torch.arange(16, dtype=torch.float64)
    share = (pairs - 5).clamp(min=0) / 10
    cosine = torch.cos(math.pi * share)
    fading = 0.5 * (1 + cosine)
    assert_close(after, before * fading)
    assert after[-1] == 0


def test_abf_is_rope_of_a_larger_base():
    larger = rope(base=500_000.0).inv_freq()
    after = extended(rope(), "abf", 40).inv_freq()
    assert_close(after, larger)


def test_rope_is_misread_as_partial_rope_of_another_layout():
    partial = encodings.build("partial_rope", SHAPE, {"fraction": 0.5})
    positions = torch.arange(L)[None]

    options = {"layout": "half", "share": 0.5, "attention_factor": 1.5}
    after = extended(RoPE(SHAPE), "misread", L, **options)

    wanted = 1.5 * partial.make_tables(positions)
    assert_close(after.make_tables(positions), wanted)
    assert after.layout == "half"


def test_the_factor_of_an_extension_stays_where_its_rope_is_misread():
    stretched = extended(RoPE(SHAPE), "yarn", 4 * L)

    after = extended(stretched, "misread", 4 * L, attention_factor=1.5)

    assert after.attention_factor == 1.5 * stretched.attention_factor


def test_no_share_of_frequencies_of_their_own_is_misread():
    resonance = RoPE(SHAPE, frequencies="resonance")
    listed = RoPE(SHAPE, frequencies=[1, 0.5, 0.2, 0.1])
    for encoding in (resonance, listed):
        with pytest.raises(UserError, match="expected none"):
            extended(encoding, "misread", L, share=0.5)


def test_facts_of_an_extension_are_its_options_and_the_frequencies_before_and_after():
    facts = facts_of(rope(8), "yarn", 4 * L)

    assert facts["inv_freq_before"] == [1.0, 0.1, 0.01, 0.001]
    assert facts["inv_freq_after"][-1] == 0.00025
    assert facts["factor"] == 4
    assert facts["dynamic"] is True
    assert facts["ramp"] == "index"
    assert facts["alpha"] == 1
    assert facts["beta"] == 32
    assert facts["attention_factor"] == pytest.approx(1.138629)


def test_a_given_factor_holds_at_every_length():
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
    pair = torch.arange(pairs, dtype=torch.float64)
    frequencies = 1e4 ** (-pair / pairs)

    turns = torch.zeros(length, length, pairs, dtype=torch.complex128)
    for i in range(length):
        for j in range(i + 1):
            angles = distance(i, j) * frequencies
            turns[i, j] = torch.exp(1j * angles)

    q_pairs = as_complex_pairs(q)  # (B, H, T, Dh/2)
    k_pairs = as_complex_pairs(k)
    products = torch.einsum("bhip,ijp,bhjp->bhij", q_pairs, turns, k_pairs.conj())
    logits = products.real.float() / math.sqrt(2 * pairs)

    pairs_of_rows = torch.ones(length, length)
    is_later = pairs_of_rows.triu(1).bool()
    return logits.masked_fill(is_later, -math.inf)


def as_complex_pairs(x: Tensor) -> Tensor:
    pairs = x.double().unflatten(-1, (-1, 2))
    return torch.view_as_complex(pairs)


def rerope_distance(window: int) -> Distance:
    return lambda i, j: min(i - j, window)


def string_distance(shift: int, local: int) -> Distance:
    """Return the paper's equation 3."""

    def distance(i, j):
        if j > i - shift:
            return i - j
        return i - j - shift + local

    return distance


def leaky_distance(window: int, k: float) -> Distance:
    def distance(i, j):
        if i - j < window:
            return i - j
        return window + (i - j - window) / k

    return distance


def dual_chunk_distance(chunk: int, size: int) -> Distance:
    """Return the paper's equation 7, with w = c - s."""
    growing = [*range(size, chunk)]
    constant = [chunk - 1] * size
    successive = growing + constant

    def distance(i, j):
        chunks_between = i // size - j // size
        of_query = chunk - 1
        if chunks_between == 0:
            of_query = i % size
        elif chunks_between == 1:
            of_query = successive[i % size]
        return of_query - j % size

    return distance


def self_extend_distance(window: int, group: int) -> Distance:
    def distance(i, j):
        if i - j < window:
            return i - j
        return i // group + window - window // group - j // group

    return distance


def jet_long_distance(window: int, group: int) -> Distance:
    def distance(i, j):
        if i - j <= window:
            return i - j
        return i // group - j // group

    return distance


def lampe_distance(length: int, window: int, tail: int, mapped: int) -> Distance:
    """Return the distance of the authors' code, from its list of mapped positions."""
    map_ids = [position * mapped // (length - 1) for position in range(length)]
    bias_1 = window - (map_ids[window] + 1)
    before_tail = length - 1 - tail
    bias_2 = before_tail - map_ids[before_tail] - bias_1

    def distance(i, j):
        if i - j <= window:
            return i - j
        if i - j >= length - tail:
            return i - bias_2 - j
        return map_ids[i] + bias_1 - map_ids[j]

    return distance


FAR_CASES = [
    ("rerope", {}, rerope_distance(4)),
    ("string", {"shift": 9, "local": 4}, string_distance(9, 4)),
    ("leaky_rerope", {}, leaky_distance(4, (40 - 1 - 4) / (16 - 1 - 4))),
    ("leaky_rerope", {"window": 7, "k": 2.5}, leaky_distance(7, 2.5)),
    ("self_extend", {"window": 6, "group": 3}, self_extend_distance(6, 3)),
    ("dual_chunk", {}, dual_chunk_distance(16, 12)),
    ("dual_chunk", {"chunk": 5}, dual_chunk_distance(16, 5)),
    ("jet_long", {}, jet_long_distance(1, 3)),
    ("jet_long", {"window": 6}, jet_long_distance(6, 3)),
    ("lampe", {}, lampe_distance(40, window=1, tail=1, mapped=5)),
    (
        "lampe",
        {"window": 4, "tail": 7, "mapped": 12},
        lampe_distance(40, window=4, tail=7, mapped=12),
    ),
]


def assert_ropes_at(distance, method, length, **options):
    """Compare the logits of an extension with RoPE's at the distances of a rule."""
    after = extended(RoPE(SHAPE), method, length, **options)
    q, k, *_ = layer_inputs(SHAPE, length, batch=1)

    logits = attention_logits(after, q, k)

    wanted = at_distances(q, k, distance)
    assert_close(logits, wanted, atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize(("method", "options", "distance"), FAR_CASES)
def test_far_pairs_are_ropes_at_the_papers_distance(method, options, distance):
    assert_ropes_at(distance, method, 40, **options)


def plain_distance(i: int, j: int) -> int:
    return i - j


@pytest.mark.parametrize(
    ("length", "distance"),
    [
        (7, plain_distance),  # shorter than two windows
        (8, lampe_distance(8, window=4, tail=2, mapped=3)),
        (L - 1, lampe_distance(L - 1, window=4, tail=2, mapped=3)),
        (L, lampe_distance(L, window=4, tail=2, mapped=2)),
    ],
)
def test_lampe_up_to_the_training_length_is_as_in_its_authors_code(length, distance):
    assert_ropes_at(distance, "lampe", length, window=4, tail=2)


def test_lampe_changes_nothing_where_nothing_would_be_squeezed():
    assert_ropes_at(plain_distance, "lampe", 12, window=2, mapped=11)


@pytest.mark.parametrize("length", [17, 40, 256])
def test_self_extend_by_default_meets_no_distance_that_training_did_not(length):
    facts = facts_of(RoPE(SHAPE), "self_extend", length)
    distance = self_extend_distance(facts["window"], facts["group"])
    for i in range(length):
        met = [distance(i, j) for j in range(i + 1)]
        assert max(met) <= L - 1


@pytest.mark.parametrize("length", [17, 40, 256])
def test_self_extends_default_group_is_the_smallest_that_suffices(length):
    facts = facts_of(RoPE(SHAPE), "self_extend", length)
    smaller = max(1, facts["group"] - 1)
    distance = self_extend_distance(facts["window"], smaller)
    of_last_row = [distance(length - 1, j) for j in range(length)]
    assert max(of_last_row) > L - 1


@pytest.mark.parametrize(
    ("length", "mapped"),
    [(1023, None), (1538, 1536), (8191, 1536), (8192, 1036), (32 * 1024, 4501)],
)
def test_lampe_maps_inputs_of_llama_3_to_as_many_as_its_authors(length, mapped):
    llama_3 = rope(train_length=8192)
    facts = facts_of(llama_3, "lampe", length)
    assert facts["mapped"] == mapped


@pytest.mark.sample(3)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("method", FAR_PAIRS)
def test_far_pairs_in_blocks_of_rows_equal_the_whole(method, layout):
    after = extended(RoPE(SHAPE, layout=layout), method, 40)
    q, k, v, _ = layer_inputs(SHAPE, 40)
    first = torch.arange(40)
    second = first + 3
    positions = torch.stack([first, second])  # every sequence its own

    whole = attention_output(after, q, k, v, positions=positions)
    parts = [attention(after, q, k, v, None, positions, 0)]
    for block in (1, 7, 40):
        inputs = (q, k, v, None)
        part = by_definition(after, inputs, positions, 0, block=block)
        parts.append(part)

    for part in parts:
        # fp32 sums in another order
        assert_close(part, whole, atol=2e-6, rtol=2e-6)


def test_a_stretched_table_keeps_its_ends_and_is_straight_between_its_rows():
    learned = encodings.build("learned", SHAPE)
    after = extended(learned, "interpolate", 61)
    nothing = torch.zeros(1, 61, 16)
    positions = torch.arange(61)[None]

    code = after.embed(nothing, positions)[0]

    table = learned.get_parameter("table")
    for position in range(61):  # four positions a row
        low, quarters = divmod(position, 4)
        high = min(low + 1, 15)
        share = quarters / 4
        wanted = torch.lerp(table[low], table[high], share)
        assert_close(code[position], wanted)


def test_a_stretched_table_ends_at_its_length():
    learned = encodings.build("learned", SHAPE)
    after = extended(learned, "interpolate", 61)
    assert after.max_length == 61

    nothing = torch.zeros(1, 62, 16)
    positions = torch.arange(62)[None]
    with pytest.raises(UserError, match="62"):
        after.embed(nothing, positions)


def test_facts_of_a_stretched_table_are_its_factor_and_that_it_follows_the_length():
    learned = encodings.build("learned", SHAPE)
    facts = facts_of(learned, "interpolate", 61)
    assert facts == {"factor": 61 / 16, "dynamic": True}


SQUEEZED = [
    ("alibi", "alibi_pi", {}),
    ("fire", "interpolate", {}),
    ("t5", "interpolate", {"num_buckets": 8, "max_distance": 16}),
    ("sinusoidal", "interpolate", {"combine": "concat"}),
]


@pytest.fixture(params=SQUEEZED)
def squeezed(request):
    """Return an encoding, and itself stretched to four times its length."""
    name, method, options = request.param
    trained = encodings.build(name, SHAPE, options)
    return trained, extended(trained, method, 4 * L)


def test_what_is_squeezed_is_the_trained_one_at_divided_positions(squeezed):
    trained, after = squeezed
    q, k, _, x = layer_inputs(SHAPE, L)
    near = torch.arange(L)
    far = 4 * near

    stretched = attention_logits(after, q, k, x, positions=far, layer=1)
    wanted = attention_logits(trained, q, k, x, positions=near, layer=1)
    assert_close(stretched, wanted)

    tokens = x[..., : after.token_dim()]
    stretched = after.embed(tokens, far[None])
    wanted = trained.embed(tokens, near[None])
    assert_close(stretched, wanted)


def test_what_is_squeezed_does_not_use_the_trained_ones_cheap_form(squeezed):
    _, after = squeezed
    q, k, v, x = layer_inputs(SHAPE, L)
    positions = torch.arange(L)[None]

    fast = attention(after, q, k, v, x, positions, 1, consecutive=True)

    whole = attention_output(after, q, k, v, x, layer=1)
    assert_close(fast, whole, atol=2e-6, rtol=2e-6)


EXTENDED = [
    ("alibi", "alibi_pi"),
    ("learned_sinks", "alibi_pi"),
    ("learned", "interpolate"),
    ("t5", "interpolate"),
    ("fire", "interpolate"),
    ("shape", "interpolate"),
    ("lerope", "yarn"),
    ("decoupled_rope", "yarn"),
    ("layered", "yarn"),
    ("temperature", "yarn"),
]
EXTENDED += [("rope", method) for method in [*FREQUENCY_RULES, "misread", *FAR_PAIRS]]


def test_every_method_is_tried():
    tried = {method for _, method in EXTENDED}
    assert tried == {*methods()}


def trained_model(config, name):
    options = {}
    if name == "learned_sinks":
        options = {"inner": "alibi"}
    return build(encoded(config, name, **options), 257).eval()


@pytest.mark.parametrize(("name", "method"), EXTENDED)
@torch.inference_mode()
def test_an_extension_leaves_the_trained_model_as_it_was(name, method, tiny_config):
    gpt = trained_model(tiny_config, name)
    trained = gpt.encoding
    ids = torch.randint(257, (2, 16))
    before = gpt(ids)

    gpt.encoding, facts = extend_encoding(trained, method, 40, 16)
    longer = torch.randint(257, (2, 40))
    logits = gpt(longer)
    assert logits.isfinite().all()
    assert "dynamic" in facts

    gpt.encoding = trained
    after = gpt(ids)
    assert torch.equal(before, after)


@pytest.mark.parametrize(("name", "method"), EXTENDED)
def test_an_extension_shares_the_parameters(name, method, tiny_config):
    trained = trained_model(tiny_config, name).encoding
    after, _ = extend_encoding(trained, method, 40, 16)

    places = {parameter.data_ptr() for parameter in after.parameters()}
    places_before = {parameter.data_ptr() for parameter in trained.parameters()}
    assert places == places_before


def test_a_scheme_has_the_methods_that_are_for_it():
    assert methods_of(RoPE(SHAPE)) == [*FREQUENCY_RULES, "misread", *FAR_PAIRS]
    assert methods_of(encodings.build("none", SHAPE)) == []


@pytest.mark.parametrize(
    ("name", "method", "options", "expected"),
    [
        ("alibi", "pi", {}, r"'alibi' has no extension 'pi': it supports alibi_pi"),
        ("rope", "longrope", {"long_factor": [1, 2]}, "expected 4 numbers"),
        ("rope", "misread", {"share": 0.4}, "extension.share is 0.4: expected an even"),
        ("rope", "misread", {"share": 0.01}, "extension.share is 0.01: expected an"),
    ],
)
def test_what_a_scheme_cannot_do_is_refused(name, method, options, expected):
    encoding = encodings.build(name, SHAPE)
    with pytest.raises(UserError, match=expected):
        extend_encoding(encoding, method, 4 * L, L, **options)
