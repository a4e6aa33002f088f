"""Numbers and examples that tutorials on positional encoding work out by hand.

What they claim in general is measured by test_properties.py and test_show.py, and
compared with others' code by test_oracles.py.
"""

import math

import pytest
import schemes
import torch

import posbench

SCHEMES = (
    "index",
    "minmax",
    "binary",
    "sine",
    "sinusoidal",
    "learned",
    "shaw",
    "t5",
    "rope",
    "alibi",
)


def build(name, d_model=32, n_heads=4, train_length=128, **options):
    """Return a scheme for a model of one layer, with learned parameters drawn anew so
    that none is zero.
    """
    encoding = posbench.build_encoding(
        name,
        d_model=d_model,
        n_heads=n_heads,
        n_layers=1,
        train_length=train_length,
        **options,
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.normal_(generator=generator)
    return encoding


def code(name, length, d_model=8, **options):
    """Return what a scheme adds at scale 1 to the embeddings of the first tokens: (T,
    D).
    """
    encoding = build(name, d_model=d_model, n_heads=1, scale=1.0, **options)
    return encoding.embed(torch.zeros(1, length, d_model), torch.arange(length)[None])[
        0
    ]


def rotated(x, positions, **options):
    """Return RoPE's f(x, m) of x (T, d) at positions (T,)."""
    encoding = build("rope", d_model=x.shape[-1], n_heads=1, **options)
    return schemes.rotated_at(
        encoding, x[None, None], x[None, None], torch.tensor(positions)[None]
    )[0][0, 0]


def attend(encoding, words):
    """Return outputs (T, D) of an unmasked attention layer with fixed random weights;
    equal words: equal vectors.
    """
    rows = [
        torch.randn(32, generator=torch.Generator().manual_seed(sum(map(ord, word))))
        for word in words.split()
    ]
    x = encoding.embed(torch.stack(rows)[None], torch.arange(len(rows))[None])
    weights = (
        torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(1)) / 32**0.5
    )
    q, k, v = (x @ weights.mT).view(3, 1, len(rows), 4, 8).transpose(2, 3)
    return (
        posbench.attention_output(encoding, q, k, v, x=x, causal=False)[0]
        .transpose(0, 1)
        .reshape(len(rows), 32)
    )


def test_every_scheme_but_none_tells_i_think_therefore_i_am_from_i_am_therefore_i_think():
    for name in ("none", *SCHEMES):
        first = attend(build(name), "i think therefore i am")
        difference = (
            (attend(build(name), "i am therefore i think") - first[[0, 4, 2, 3, 1]])
            .abs()
            .max()
        )
        assert difference < 1e-5 if name == "none" else difference > 1e-3, name


def test_codes_are_those_that_the_tutorials_print():
    written = [
        "".join(str(int(digit)) for digit in row[:3])
        for row in code("binary", 8, digits=3)
    ]
    assert written == ["000", "100", "010", "110", "001", "101", "011", "111"]
    sine = [
        [0, 0, 0, 0],
        [0.841471, 0.099833, 0.0099998, 0.001],
        [0.909297, 0.198669, 0.0199987, 0.002],
    ]
    torch.testing.assert_close(
        code("sine", 3, d_model=4), torch.tensor(sine), atol=1e-6, rtol=0
    )
    sinusoidal = [
        [0.84147, 0.54030, 0.099833, 0.99500, 0.0099998, 0.99995, 0.001, 1],
        [0.90930, -0.41615, 0.19867, 0.98007, 0.019999, 0.99980, 0.002, 1],
        [0.14112, -0.98999, 0.29552, 0.95534, 0.029995, 0.99955, 0.003, 1],
    ]
    torch.testing.assert_close(
        code("sinusoidal", 4)[1:], torch.tensor(sinusoidal), rtol=1e-4, atol=1e-7
    )
    assert code("sinusoidal", 1).tolist() == [[0, 1] * 4]


def test_worked_rotations_and_scores():
    for k, m, n, score in (
        ([1, 0], 3, 1, math.cos(2)),
        ([0, 1], 3, 1, math.sin(2)),
        ([0, 1], 1, 3, -math.sin(2)),
    ):
        turned_q, turned_k = rotated(torch.tensor([[1.0, 0.0], k]), [m, n])
        # order shows in the sign
        assert (turned_q @ turned_k).item() == pytest.approx(score, abs=1e-6)
    for layout, expected in (
        ("interleaved", [-1.142640, 1.922076, 2.959851, 4.029800]),
        ("half", [-1.984111, 1.959901, 2.462378, 4.019800]),
    ):
        turned = rotated(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), [1], layout=layout)
        torch.testing.assert_close(turned, torch.tensor([expected]), atol=2e-6, rtol=0)
