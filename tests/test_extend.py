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
    return RoPE(
        Shape(d_model=2 * head_dim, n_heads=2, n_layers=1, train_length=train_length),
        base,
    )


def spectrum(
    encoding: RoPE, method: str, length: int, **options: Any
) -> tuple[Tensor, float]:
    """Return frequencies and attention factor after an extension."""
    after, _ = extend_encoding(
        encoding, method, length, encoding.shape.train_length, **options
    )
    assert isinstance(after, Rotary)
    return after.inv_freq(), after.attention_factor


@pytest.mark.parametrize(
    "name", [name for name in SCALINGS if "factor" in encodings.options_of(name)]
)
@pytest.mark.parametrize("length", [L, 3 * L])
def test_the_encoding_of_a_scaling_is_rope_under_the_extension_of_that_name(
    length, name
):
    encoding: Any = encodings.build(name, rope(16).shape, {"factor": 2.5})
    positions = torch.arange(length)[None]
    extended_rope, _ = extend_encoding(rope(16), name, length, L, factor=2.5)
    torch.testing.assert_close(
        encoding.make_tables(positions),
        extended_rope.make_tables(positions),
        rtol=1e-6,
        atol=0,
    )


def test_rules_that_transformers_does_not_have_are_those_of_their_papers():
    encoding = rope(32, train_length=64)
    before = encoding.inv_freq()
    assert sum(2 * math.pi / f > 64 for f in before.tolist()) == 11
    wave = [
        0.5 * (1 + math.cos(math.pi * (pair - 5) / 10)) if pair >= 5 else 1.0
        for pair in range(16)
    ]
    after = spectrum(encoding, "clipped_rope", 128)[0]
    torch.testing.assert_close(after, before * torch.tensor(wave, dtype=torch.float64))
    assert float(after[-1]) == 0
    torch.testing.assert_close(
        spectrum(rope(), "abf", 40)[0], rope(base=500_000.0).inv_freq()
    )
    # NTK keeps the first pair and slows the last by its factor
    for head_dim in (4, 16, 128):
        before = rope(head_dim).inv_freq()
        after = spectrum(rope(head_dim), "ntk", 7 * L)[0]
        assert float(after[0]) == 1
        assert float(before[-1] / after[-1]) == pytest.approx(7, rel=1e-12)
    rotations = 1024 * rope(64).inv_freq() / (2 * math.pi)
    mixed = (
        spectrum(rope(64, train_length=1024), "yarn", 4096, ramp="rotations")[0]
        / rope(64).inv_freq()
    )
    kept = ((rotations - 1) / 31).clamp(0, 1)
    torch.testing.assert_close(mixed, kept + (1 - kept) / 4)


def test_facts_of_an_extension_are_its_options_and_the_frequencies_before_and_after():
    _, facts = extend_encoding(rope(8), "yarn", 4 * L, L)
    assert facts["inv_freq_before"] == [1.0, 0.1, 0.01, 0.001]
    assert facts["inv_freq_after"][-1] == 0.00025
    options = [facts[key] for key in ("factor", "dynamic", "ramp", "alpha", "beta")]
    assert options == [4, True, "index", 1, 32]
    assert facts["attention_factor"] == pytest.approx(1.138629)
    _, fixed = extend_encoding(rope(8), "yarn", L, L, factor=4)
    assert fixed["dynamic"] is False
    assert fixed["inv_freq_after"] == facts["inv_freq_after"]


def at_distances(q: Tensor, k: Tensor, distance: Callable[[int, int], float]) -> Tensor:
    """Return causal logits, RoPE's at `distance(i, j)` for pair (i, j), by complex
    numbers of channels (2p, 2p + 1).
    """
    length = q.shape[2]
    pairs = q.shape[3] // 2
    distances = torch.tensor(
        [[float(distance(i, min(i, j))) for j in range(length)] for i in range(length)]
    )
    angles = distances.double()[..., None] * 1e4 ** (
        -torch.arange(pairs).double() / pairs
    )
    of_q, of_k = (
        torch.view_as_complex(x.double().unflatten(-1, (pairs, 2))) for x in (q, k)
    )
    logits = torch.einsum(
        "bhip,ijp,bhjp->bhij", of_q, torch.exp(1j * angles), of_k.conj()
    ).real / math.sqrt(2 * pairs)
    return logits.float().masked_fill(
        torch.ones(length, length).triu(1).bool(), -math.inf
    )


def leaky_distance(w: int, k: float) -> Callable[[int, int], float]:
    return lambda i, j: i - j if i - j < w else w + (i - j - w) / k


def dual_chunk_distance(c: int, s: int) -> Callable[[int, int], float]:
    # the paper's equation 7, with w = c - s
    successive = [*range(s, c), *[c - 1] * s][:s]
    return lambda i, j: (
        [i % s, successive[i % s], c - 1][min(i // s - j // s, 2)] - j % s
    )


def self_extend_distance(w: int, group: int) -> Callable[[int, int], float]:
    return lambda i, j: (
        i - j if i - j < w else (i // group + w - w // group) - j // group
    )


FAR_CASES: list[tuple[str, dict[str, Any], Callable[[int, int], float]]] = [
    ("rerope", {}, lambda i, j: min(i - j, 4)),
    # equation 3
    (
        "string",
        {"shift": 9, "local": 4},
        lambda i, j: i - j - 9 + 4 if j <= i - 9 else i - j,
    ),
    ("leaky_rerope", {}, leaky_distance(4, (40 - 1 - 4) / (16 - 1 - 4))),
    ("leaky_rerope", {"window": 7, "k": 2.5}, leaky_distance(7, 2.5)),
    ("self_extend", {"window": 6, "group": 3}, self_extend_distance(6, 3)),
    ("dual_chunk", {}, dual_chunk_distance(16, 12)),
    ("dual_chunk", {"chunk": 5}, dual_chunk_distance(16, 5)),
]


@pytest.mark.parametrize(("method", "options", "distance"), FAR_CASES)
def test_far_pairs_are_ropes_at_the_papers_distance(method, options, distance):
    after, _ = extend_encoding(RoPE(SHAPE), method, 40, L, **options)
    q, k, *_ = layer_inputs(SHAPE, 40, batch=1)
    torch.testing.assert_close(
        attention_logits(after, q, k),
        at_distances(q, k, distance),
        atol=5e-6,
        rtol=5e-6,
    )


@pytest.mark.parametrize("length", [17, 40, 256])
def test_self_extend_by_default_meets_no_distance_that_training_did_not(length):
    facts = extend_encoding(RoPE(SHAPE), "self_extend", length, L)[1]
    far, farther = (
        self_extend_distance(facts["window"], max(1, facts["group"] - less))
        for less in (0, 1)
    )
    assert max(far(i, j) for i in range(length) for j in range(i + 1)) <= L - 1
    # it is the smallest that suffices
    assert max(farther(length - 1, j) for j in range(length)) > L - 1


@pytest.mark.sample(3)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("method", FAR_PAIRS)
def test_far_pairs_in_blocks_of_rows_equal_the_whole(method, layout):
    after, _ = extend_encoding(RoPE(SHAPE, layout=layout), method, 40, L)
    q, k, v, _ = layer_inputs(SHAPE, 40)
    # every sequence its own
    positions = torch.stack([torch.arange(40), torch.arange(40) + 3])
    whole = attention_output(after, q, k, v, positions=positions)
    blocks = [
        by_definition(after, (q, k, v, None), positions, 0, block=block)
        for block in (1, 7, 40)
    ]
    for out in (*blocks, attention(after, q, k, v, None, positions, 0)):
        # fp32 sums in another order
        torch.testing.assert_close(out, whole, atol=2e-6, rtol=2e-6)


def test_a_stretched_table_keeps_its_ends_and_is_straight_between_its_rows():
    learned = encodings.build("learned", SHAPE)
    after, facts = extend_encoding(learned, "interpolate", 61, L)
    assert facts == {"factor": 61 / 16, "dynamic": True}
    assert after.max_length == 61
    code = after.embed(torch.zeros(1, 61, 16), torch.arange(61)[None])[0]
    table = learned.get_parameter("table")
    for i in range(61):  # four positions a row
        low = i // 4
        share = i % 4 / 4
        torch.testing.assert_close(
            code[i], table[low] * (1 - share) + table[min(low + 1, 15)] * share
        )
    with pytest.raises(UserError, match="62"):
        after.embed(torch.zeros(1, 62, 16), torch.arange(62)[None])


@pytest.mark.parametrize(
    ("name", "method", "options"),
    [
        ("alibi", "alibi_pi", {}),
        ("fire", "interpolate", {}),
        ("t5", "interpolate", {"num_buckets": 8, "max_distance": 16}),
        ("sinusoidal", "interpolate", {"combine": "concat"}),
    ],
)
def test_what_is_squeezed_is_the_trained_one_at_divided_positions(
    name, method, options
):
    trained = encodings.build(name, SHAPE, options)
    after, _ = extend_encoding(trained, method, 4 * L, L)
    q, k, v, x = layer_inputs(SHAPE, L)
    positions = torch.arange(L)
    stretched = attention_logits(after, q, k, x, positions=4 * positions, layer=1)
    torch.testing.assert_close(
        stretched, attention_logits(trained, q, k, x, positions=positions, layer=1)
    )
    # not by the trained one's cheap form
    fast = attention(after, q, k, v, x, positions[None], 1, consecutive=True)
    torch.testing.assert_close(
        fast, attention_output(after, q, k, v, x, layer=1), atol=2e-6, rtol=2e-6
    )
    x = x[..., : after.token_dim()]
    torch.testing.assert_close(
        after.embed(x, 4 * positions[None]), trained.embed(x, positions[None])
    )


OF_METHOD = {
    "alibi_pi": ["alibi", "learned_sinks"],
    "interpolate": ["learned", "t5", "fire", "shape"],
}


@pytest.mark.parametrize(
    ("name", "method"),
    [(name, method) for method in methods() for name in OF_METHOD.get(method, ["rope"])]
    + [
        (name, "yarn")
        for name in ("lerope", "decoupled_rope", "layered", "temperature")
    ],
)
def test_an_extension_shares_the_parameters_and_leaves_the_trained_model_as_it_was(
    name, method, tiny_config
):
    options = {"inner": "alibi"} if name == "learned_sinks" else {}
    gpt = build(encoded(tiny_config, name, **options), 257).eval()
    trained = gpt.encoding
    ids = torch.randint(257, (2, 16))
    with torch.inference_mode():
        before = gpt(ids)
        gpt.encoding, facts = extend_encoding(trained, method, 40, 16)
        assert gpt(torch.randint(257, (2, 40))).isfinite().all()
        assert "dynamic" in facts
        pointers = {p.data_ptr() for p in gpt.encoding.parameters()}
        gpt.encoding = trained
        assert torch.equal(before, gpt(ids))
    assert pointers == {p.data_ptr() for p in trained.parameters()}


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
