"""The tutorials' properties: what the numbers say, and the numbers where a page works
them out.
"""

import functools
import json
import math
from typing import Any

import numpy as np
import pytest
import support

from posbench import encodings
from posbench.encodings.base import Shape
from posbench.show import flips, panels, properties
from posbench.typed import Typed

COLUMNS = [
    "order",
    "unique",
    "relative_code",
    "relative_logit",
    "continuous",
    "invariant",
    "purpose",
]
EXPECTED = {
    # order, unique, code, logit, continuous, invariant, purpose
    "none": "no        no     n/a    yes    n/a    yes    neither",
    "index": "partial   yes    yes    no     yes    yes    both",
    "minmax": "yes       yes    yes    no     yes    no     both",
    "binary": "yes       yes    no     no     no     yes    both",
    "sine": "yes       yes    no     no     yes    yes    both",
    "sinusoidal": "yes       yes    yes    no     yes    yes    both",
    "learned": "yes       yes    no     no     no     yes    both",
    "shaw": "partial   no     n/a    yes    no     yes    both",
    "t5": "partial   no     n/a    yes    no     yes    scores",
    "rope": "yes       yes    n/a    yes    yes    yes    scores",
    "alibi": "yes       yes    n/a    yes    yes    yes    scores",
}
PAIRS = math.comb(47, 2)  # swaps of two tokens before the last of 48

# Swaps of two tokens at distances in one bucket of t5.
BUCKETS = (3, 2, 3, 3, 4, 4, 5, 6, 2)
ALIKE_IN_T5 = sum(math.comb(size, 2) for size in BUCKETS)
# Numbers that a page works out.
FIGURES = [
    ("none", "order", 0),
    ("none", "unique", 0),
    ("index", "unique", 1),
    ("index", "continuous", 1 / 256),  # in one of 32 channels
    ("index", "spread", math.sqrt(159 * 319 / 6 / 32)),
    ("minmax", "unique", 1 / 95),
    ("binary", "unique", 1),
    ("binary", "continuous", 1),
    ("sinusoidal", "unique", 1.172),
    # the slow cosines stay near 1, so that the mean is not 0
    ("sinusoidal", "spread", 0.5**0.5),
    # the 32 tokens at distance 16 or more look alike
    ("shaw", "order", 1 - math.comb(48 - 16, 2) / PAIRS),
    ("t5", "order", 1 - ALIKE_IN_T5 / PAIRS),
    ("alibi", "unique", 2 * 2**-8),  # of four contents, one head of slope 2^-8
    # what is added is the same for both keys
    ("sinusoidal", "flips_1x", 0),
    ("t5", "flips_8x", 0),
    ("fox", "flips_8x", 0),
]


@functools.cache
def measured(name: str) -> dict[str, Any]:
    table = properties.measure([name])
    (row,) = table.to_dict("records")
    return row


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", EXPECTED)
def test_words_are_the_expected_ones(name):
    row = measured(name)
    words = [properties.in_words(row, column) for column in COLUMNS]
    assert words == EXPECTED[name].split()


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "column", "expected"), FIGURES)
def test_figures_are_those_that_a_page_works_out(name, column, expected):
    figure = measured(name)[column]
    assert figure == pytest.approx(expected, rel=2e-3, abs=1e-6)


@pytest.mark.parametrize(("pairs", "moved"), [(1, 1), (1, 3), (1, 4), (4, 7), (16, 99)])
def test_rope_flips_the_order_of_keys_as_often_as_the_closed_form_says(pairs, moved):
    shape = Shape(d_model=64 * pairs, n_heads=32, n_layers=1, train_length=128)
    rope = encodings.build("rope", shape, {})
    share = flips.flipped(rope, moved + 2 * panels.MARGIN + 1)

    # For a given query the differences of two keys' logits, before and after the move,
    # are normal. Their correlation is the mean cosine of the channels' angles, weighted
    # by the query's squared norms, which are exponential: Dirichlet as shares.
    angles = moved * 10_000.0 ** (-np.arange(pairs) / pairs)
    weights = np.random.default_rng(0).dirichlet(np.ones(pairs), 20_000)
    chances = np.arccos(weights @ np.cos(angles)) / np.pi
    assert share == pytest.approx(chances.mean(), abs=0.015)


def test_an_order_that_a_window_hides_is_not_defined():
    layers = [{"name": "rope", "window": 64}] * 4
    windowed = encodings.build("layered", flips.SHAPE, {"layers": layers})
    assert math.isnan(flips.flipped(windowed, 128))


def test_files_with_classes_of_one_name_are_measured_each_by_its_own(tmp_path):
    words = []
    for base in ("MinMax", "Binary"):
        file = tmp_path / f"{base}.py"
        code = f"from posbench.encodings.absolute import {base}\n"
        code += f"class Mine({base}): 'Mine.'\n"
        file.write_text(code)
        words.append(Typed(f"{file}:Mine"))

    table = properties.measure(words)

    of_minmax, of_binary = table["unique"]

    assert of_minmax == pytest.approx(1 / 95, rel=2e-3)
    assert of_binary == pytest.approx(1.0, rel=2e-3)


def test_the_command_prints_words(capsys):
    assert support.posbench("properties", "sine") == 0
    assert "yes" in capsys.readouterr().out


def test_the_command_prints_numbers_as_json(capsys):
    assert support.posbench("properties", "sine", "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["order"] == 1.0
