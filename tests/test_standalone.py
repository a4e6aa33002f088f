"""`posbench.attention` in models of others: every scheme, whole, by a key-value cache,
and what it refuses.
"""

from typing import Any

import pytest
import schemes
import torch
from torch import Tensor

import posbench
from posbench.encodings.base import Encoding, Shape
from posbench.errors import Undefined, UserError

SHAPE = Shape(d_model=32, n_heads=4, n_layers=2, train_length=32)
CASES = pytest.mark.parametrize("case", schemes.parameters())
T = 19
CLOSE = {"atol": 2e-5, "rtol": 2e-5}


def built(
    case: tuple[str, dict[str, Any]],
) -> tuple[Encoding, list[Tensor], Tensor | None]:
    """Return a scheme, q, k, v and x of T tokens, and positions if the scheme chooses
    them.
    """
    encoding = schemes.build(*case, SHAPE)
    chosen = (
        encoding.positions(torch.zeros(2, T, dtype=torch.long), None)
        if "positions" in encoding.hooks
        else None
    )
    return encoding, list(schemes.layer_inputs(SHAPE, T)), chosen


@pytest.mark.sample(2)
@CASES
@torch.no_grad()
def test_it_is_the_definition_also_in_16_bits(case):
    encoding, (q, k, v, x), positions = built(case)
    for causal in (True, False):
        expected = posbench.attention_output(encoding, q, k, v, x, 1, positions, causal)
        out = posbench.attention(encoding, q, k, v, positions, 1, x, causal=causal)
        torch.testing.assert_close(out, expected, **CLOSE)
    q, k, v, x = (each.bfloat16() for each in (q, k, v, x))
    exact = posbench.attention_output(encoding, q, k, v, x, 1, positions)
    out = posbench.attention(encoding, q, k, v, positions, 1, x)
    assert out.dtype == torch.bfloat16
    assert float((out - exact).pow(2).mean().sqrt()) < 0.03 * float(
        exact.pow(2).mean().sqrt()
    )


@pytest.mark.sample(2)
@CASES
@torch.no_grad()
def test_a_cache_gives_the_rows_of_the_whole_or_is_refused_and_what_is_read_of_earlier_tokens_is_declared(
    case,
):
    encoding, (q, k, v, x), positions = built(case)
    whole = posbench.attention(encoding, q, k, v, positions, 1, x)
    for name, given in (
        ("q", (torch.cat((q[:, :, :-1] + 1, q[:, :, -1:]), 2), k, v, positions, 1, x)),
        ("x", (q, k, v, positions, 1, torch.cat((x[:, :-1] + 1, x[:, -1:]), 1))),
    ):
        changed = posbench.attention(encoding, *given)[:, :, -1]
        assert torch.allclose(changed, whole[:, :, -1], **CLOSE) == (
            name not in encoding.history
        ), name
    if encoding.length_dependent or "q" in encoding.history:
        with pytest.raises(UserError, match="no key-value cache"):
            posbench.attention(encoding, q[:, :, -1:], k, v, positions, 1, x)
        return
    # a prompt, two tokens one by one, five at once
    for first, end in ((0, 12), (12, 13), (13, 14), (14, T)):
        read = x[:, :end] if "x" in encoding.history else x[:, first:end]
        where = None if positions is None else positions[:, :end]
        out = posbench.attention(
            encoding, q[:, :, first:end], k[:, :, :end], v[:, :, :end], where, 1, read
        )
        torch.testing.assert_close(out, whole[:, :, first:end], **CLOSE)
    if "x" in encoding.history:
        with pytest.raises(UserError, match="keep x beside keys and values"):
            posbench.attention(encoding, q[:, :, -1:], k, v, positions, 1, x[:, -1:])


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        (
            "rope",
            {"q": (1, T, 32)},
            r"q is \(1, 19, 32\): expected \(B, H, T, Dh\), here \(B, 4, T, 8\)",
        ),
        (
            "rope",
            {"k": (1, 4, 5, 8)},
            r"k is \(1, 4, 5, 8\): expected \(1, 4, 19, 8\), as q, or fewer heads",
        ),
        (
            "rope",
            {"positions": (3,)},
            r"positions is \(1, 3\): expected \(19,\) or \(1, 19\)",
        ),
        ("rope", {"layer": 2}, "layer is 2: expected 0 to 1"),
        ("alibi", {"cast": True}, "was cast to torch.bfloat16"),
        ("fox", {}, "pass x"),
        ("sinusoidal", {}, "acts on the model's input"),
        ("randomized", {}, "chooses positions by itself"),
    ],
)
def test_mistakes_are_told_in_one_line(name, given, message):
    encoding = posbench.build_encoding(
        name, d_model=32, n_heads=4, n_layers=2, train_length=32
    )
    encoding = encoding.to(torch.bfloat16) if given.pop("cast", False) else encoding
    shapes = dict.fromkeys("qkv", (1, 4, T, 8)) | {
        key: size for key, size in given.items() if isinstance(size, tuple)
    }
    with pytest.raises(UserError, match=message) as caught:
        posbench.attention(
            encoding, **given | {key: torch.zeros(size) for key, size in shapes.items()}
        )
    assert "\n" not in str(caught.value)


def test_positions_beyond_a_table_are_undefined():
    encoding, (q, k, v, x), _ = built(("tupe", {}))
    with pytest.raises(
        Undefined, match=f"position {T + 31} is beyond the end of 'tupe'"
    ):
        posbench.attention(
            encoding, q, k, v, torch.arange(T) + SHAPE.train_length, 1, x
        )
