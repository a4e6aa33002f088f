"""`posbench.attention` in models of others: every scheme, whole, by a key-value cache,
and what it refuses.
"""

from typing import Any

import pytest
import schemes
import torch
from torch import Tensor
from torch.testing import assert_close

import posbench
from posbench.encodings.base import Encoding, Shape
from posbench.errors import Undefined, UserError

SHAPE = Shape(d_model=32, n_heads=4, n_layers=2, train_length=32)
CASES = pytest.mark.parametrize("case", schemes.parameters())
T = 19
CLOSE = {"atol": 2e-5, "rtol": 2e-5}


def positions_of(encoding: Encoding) -> Tensor | None:
    """Return positions of T tokens if the scheme chooses them."""
    if "positions" not in encoding.hooks:
        return None
    ids = torch.zeros(2, T, dtype=torch.long)
    return encoding.positions(ids, None)


@pytest.mark.sample(2)
@CASES
@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_it_is_the_definition(case, causal):
    encoding = schemes.build(*case, SHAPE)
    positions = positions_of(encoding)
    q, k, v, x = schemes.layer_inputs(SHAPE, T)
    expected = posbench.attention_output(encoding, q, k, v, x, 1, positions, causal)
    out = posbench.attention(encoding, q, k, v, positions, 1, x, causal=causal)
    assert_close(out, expected, **CLOSE)


@pytest.mark.sample(2)
@CASES
@torch.no_grad()
def test_in_16_bits_it_is_near_the_definition(case):
    encoding = schemes.build(*case, SHAPE)
    positions = positions_of(encoding)
    in_full = schemes.layer_inputs(SHAPE, T)
    q, k, v, x = (each.bfloat16() for each in in_full)
    expected = posbench.attention_output(encoding, q, k, v, x, 1, positions)

    out = posbench.attention(encoding, q, k, v, positions, 1, x)

    assert out.dtype == torch.bfloat16
    error = float((out - expected).norm())
    size = float(expected.norm())
    assert error < 0.03 * size


@pytest.mark.sample(2)
@CASES
@pytest.mark.parametrize("changed", ["q", "x"])
@torch.no_grad()
def test_what_a_scheme_reads_of_earlier_tokens_is_declared(case, changed):
    encoding = schemes.build(*case, SHAPE)
    positions = positions_of(encoding)
    q, k, v, x = schemes.layer_inputs(SHAPE, T)
    before = posbench.attention(encoding, q, k, v, positions, 1, x)
    if changed == "q":
        q[:, :, :-1] += 1
    else:
        x[:, :-1] += 1
    after = posbench.attention(encoding, q, k, v, positions, 1, x)
    last_before = before[:, :, -1]
    last_after = after[:, :, -1]
    is_same = torch.allclose(last_after, last_before, **CLOSE)
    assert is_same != (changed in encoding.history)


def has_a_cache(encoding: Encoding) -> bool:
    return not encoding.length_dependent and "q" not in encoding.history


# a prompt, two tokens one by one, five at once
CHUNKS = [(0, 12), (12, 13), (13, 14), (14, T)]


@pytest.mark.sample(2)
@CASES
@torch.no_grad()
def test_a_cache_gives_the_rows_of_the_whole(case):
    encoding = schemes.build(*case, SHAPE)
    if not has_a_cache(encoding):
        return
    positions = positions_of(encoding)
    q, k, v, x = schemes.layer_inputs(SHAPE, T)
    whole = posbench.attention(encoding, q, k, v, positions, 1, x)
    for first, end in CHUNKS:
        new_q = q[:, :, first:end]
        seen_k = k[:, :, :end]
        seen_v = v[:, :, :end]
        places = None
        if positions is not None:
            places = positions[:, :end]
        read = x[:, first:end]
        if "x" in encoding.history:
            read = x[:, :end]
        out = posbench.attention(encoding, new_q, seen_k, seen_v, places, 1, read)
        assert_close(out, whole[:, :, first:end], **CLOSE)


@pytest.mark.sample(2)
@CASES
@torch.no_grad()
def test_a_scheme_that_cannot_read_a_cache_says_so(case):
    encoding = schemes.build(*case, SHAPE)
    q, k, v, x = schemes.layer_inputs(SHAPE, T)
    if not has_a_cache(encoding):
        message = "no key-value cache"
    elif "x" in encoding.history:
        message = "keep x beside keys and values"
        x = x[:, -1:]
    else:
        return
    last_q = q[:, :, -1:]
    positions = positions_of(encoding)
    with pytest.raises(UserError, match=message):
        posbench.attention(encoding, last_q, k, v, positions, 1, x)


def zeros(*size: int) -> Tensor:
    return torch.zeros(size)


MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    (
        "rope",
        {"q": zeros(1, T, 32)},
        r"q is \(1, 19, 32\): expected \(B, H, T, Dh\), here \(B, 4, T, 8\)",
    ),
    (
        "rope",
        {"k": zeros(1, 4, 5, 8)},
        r"k is \(1, 4, 5, 8\): expected \(1, 4, 19, 8\), as q, or fewer heads",
    ),
    ("rope", {"k": zeros(1, 2, T, 8)}, "v has 4 heads: expected 2, as k"),
    (
        "rope",
        {"positions": zeros(3)},
        r"positions is \(1, 3\): expected \(19,\) or \(1, 19\)",
    ),
    ("rope", {"layer": 2}, "layer is 2: expected 0 to 1"),
    ("fox", {}, "pass x"),
    ("sinusoidal", {}, "acts on the model's input"),
    ("randomized", {}, "chooses positions by itself"),
]


@pytest.mark.parametrize(("name", "mistake", "message"), MISTAKES)
def test_mistakes_are_told_in_one_line(name, mistake, message):
    encoding = schemes.untrained(name, {}, SHAPE)
    given = {name: zeros(1, 4, T, 8) for name in "qkv"}
    given.update(mistake)
    with pytest.raises(UserError, match=message) as caught:
        posbench.attention(encoding, **given)
    assert "\n" not in str(caught.value)


def test_positions_beyond_a_table_are_undefined():
    encoding = schemes.build("tupe", {}, SHAPE)
    q, k, v, x = schemes.layer_inputs(SHAPE, T)
    beyond = torch.arange(T) + SHAPE.train_length

    message = f"position {T + 31} is beyond the end of 'tupe'"
    with pytest.raises(Undefined, match=message):
        posbench.attention(encoding, q, k, v, beyond, 1, x)


def test_an_encoding_that_was_cast_is_refused():
    encoding = schemes.untrained("alibi", {}, SHAPE)
    encoding = encoding.to(torch.bfloat16)
    q, k, v, _ = schemes.layer_inputs(SHAPE, T)
    with pytest.raises(UserError, match=r"was cast to torch\.bfloat16"):
        posbench.attention(encoding, q, k, v)
