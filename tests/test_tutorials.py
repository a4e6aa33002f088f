"""Numbers and examples that tutorials on positional encoding work out by hand.

What they claim in general is measured by test_properties.py and test_show.py, and
compared with others' code by test_oracles.py.
"""

import math

import pytest
import schemes
import torch
from torch.testing import assert_close

import posbench
from posbench.encodings.base import Shape

SCHEMES = [
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
]
SHAPE = Shape(d_model=32, n_heads=4, n_layers=1, train_length=128)


def code(name, length, d_model=8, **options):
    """Return what a scheme adds at scale 1 to the embeddings of the first tokens: (T,
    D).
    """
    shape = Shape(d_model, n_heads=1, n_layers=1, train_length=128)
    encoding = schemes.build(name, {"scale": 1.0, **options}, shape)
    nothing = torch.zeros(1, length, d_model)
    positions = torch.arange(length)[None]
    return encoding.embed(nothing, positions)[0]


def rotated(x, positions, **options):
    """Return RoPE's f(x, m) of x (T, d) at positions (T,)."""
    width = x.shape[-1]
    shape = Shape(width, n_heads=1, n_layers=1, train_length=128)
    encoding = schemes.build("rope", options, shape)
    vectors = x[None, None]
    places = torch.tensor(positions)[None]
    turned, _ = schemes.rotated_at(encoding, vectors, vectors, places)
    return turned[0, 0]


def attend(name, words):
    """Return outputs (T, H, Dh) of an unmasked attention layer with fixed random
    weights; equal words: equal vectors.
    """
    encoding = schemes.build(name, {}, SHAPE)
    tokens = []
    for word in words.split():
        seed = sum(ord(letter) for letter in word)
        tokens.append(schemes.random(32, seed=seed))
    length = len(tokens)
    positions = torch.arange(length)[None]
    stacked = torch.stack(tokens)[None]
    x = encoding.embed(stacked, positions)
    weights = schemes.random(3, 32, 32, seed=1) / 32**0.5
    projected = (x @ weights.mT).view(3, 1, length, 4, 8)
    q, k, v = projected.transpose(2, 3)
    output = posbench.attention_output(encoding, q, k, v, x=x, causal=False)
    return output[0].transpose(0, 1)


def change_of_order(name):
    """Return how the outputs of words differ in two orders of them."""
    first = attend(name, "i think therefore i am")
    second = attend(name, "i am therefore i think")
    first_in_its_order = first[[0, 4, 2, 3, 1]]
    return (second - first_in_its_order).abs().max()


@pytest.mark.parametrize("name", SCHEMES)
def test_a_scheme_tells_i_think_therefore_i_am_from_i_am_therefore_i_think(name):
    assert change_of_order(name) > 1e-3


def test_without_an_encoding_they_are_the_same():
    assert change_of_order("none") < 1e-5


def test_binary_codes_are_those_that_the_tutorials_print():
    expected = [
        [0, 0, 0],
        [1, 0, 0],
        [0, 1, 0],
        [1, 1, 0],
        [0, 0, 1],
        [1, 0, 1],
        [0, 1, 1],
        [1, 1, 1],
    ]
    made = code("binary", 8, digits=3)
    assert made[:, :3].tolist() == expected


def test_sines_are_those_that_the_tutorials_print():
    expected = [
        [0, 0, 0, 0],
        [0.841471, 0.099833, 0.0099998, 0.001],
        [0.909297, 0.198669, 0.0199987, 0.002],
    ]
    made = code("sine", 3, d_model=4)
    assert_close(made, torch.tensor(expected), atol=1e-6, rtol=0)


def test_sinusoids_are_those_that_the_tutorials_print():
    expected = [
        [0, 1, 0, 1, 0, 1, 0, 1],
        [0.84147, 0.54030, 0.099833, 0.99500, 0.0099998, 0.99995, 0.001, 1],
        [0.90930, -0.41615, 0.19867, 0.98007, 0.019999, 0.99980, 0.002, 1],
        [0.14112, -0.98999, 0.29552, 0.95534, 0.029995, 0.99955, 0.003, 1],
    ]
    made = code("sinusoidal", 4)
    assert_close(made, torch.tensor(expected), rtol=1e-4, atol=1e-7)


SCORES = [
    ([1.0, 0.0], 3, 1, math.cos(2)),
    # order shows in the sign
    ([0.0, 1.0], 3, 1, math.sin(2)),
    ([0.0, 1.0], 1, 3, -math.sin(2)),
]


@pytest.mark.parametrize(("key", "m", "n", "score"), SCORES)
def test_the_score_of_a_turned_query_at_m_and_key_at_n(key, m, n, score):
    vectors = torch.tensor([[1.0, 0.0], key])
    turned_query, turned_key = rotated(vectors, [m, n])
    product = turned_query @ turned_key
    assert product.item() == pytest.approx(score, abs=1e-6)


TURNED = [
    ("interleaved", [-1.142640, 1.922076, 2.959851, 4.029800]),
    ("half", [-1.984111, 1.959901, 2.462378, 4.019800]),
]


@pytest.mark.parametrize(("layout", "expected"), TURNED)
def test_a_rotation_by_one_position(layout, expected):
    vector = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    turned = rotated(vector, [1], layout=layout)
    assert_close(turned[0], torch.tensor(expected), atol=2e-6, rtol=0)
