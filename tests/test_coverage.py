"""How often intervals hold the truth on the losses of trained models: documents of the built-in corpus are drawn from
those measured, blocks dealt to them, seeds drawn from the runs. tests/data/losses.npz is made by scripts/coverage.py.
"""

from pathlib import Path

import numpy as np
import pytest
from support import script

LOSSES = Path(__file__).parent / "data" / "losses.npz"
TRIALS = 500  # the standard error of a 95 % rate over them is 1 %
POPULATIONS = [("rope", None), ("alibi", "rope")]
QUANTITIES = ("1x", "rise 4x", "rise 16x")


def rate(scheme: str, less: str | None, quantity: str, documents: int, method: str) -> float:
    made, seeds = script("coverage").METHODS[method]
    whole = script("coverage").population(LOSSES, scheme, less)
    found, _ = script("coverage").coverage(whole, quantity, documents, seeds, made, TRIALS)
    return float(found)


@pytest.mark.sample(12)
@pytest.mark.parametrize("method", ["one checkpoint, documents", "five seeds, seeds and documents"])
@pytest.mark.parametrize("documents", [8, 20, 60])
@pytest.mark.parametrize("quantity", QUANTITIES)
@pytest.mark.parametrize(("scheme", "less"), POPULATIONS)
def test_intervals_hold_the_truth_as_often_as_they_say(
    scheme: str, less: str | None, quantity: str, documents: int, method: str
) -> None:
    assert 0.92 <= rate(scheme, less, quantity, documents, method) <= 0.97


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_segments_of_a_text_of_twenty_chapters_come_near(quantity: str) -> None:
    assert rate("rope", None, quantity, 20, "one checkpoint, segments (documents as chapters of one)") >= 0.9


def test_blocks_taken_for_independent_would_not() -> None:
    assert rate("rope", None, "1x", 8, "one checkpoint, blocks") < 0.86
    assert rate("rope", None, "1x", 20, "one checkpoint, blocks") < 0.9
    assert rate("rope", None, "rise 16x", 8, "one checkpoint, blocks") < 0.92


def test_seeds_alone_would_not_hold_for_other_text() -> None:
    assert rate("rope", None, "1x", 20, "five seeds, seeds") < 0.5
    assert rate("alibi", "rope", "rise 16x", 20, "five seeds, seeds") < 0.85


@pytest.mark.sample(2)
@pytest.mark.parametrize(("characters", "number"), [(1_200_000, 30), (500_000, 15)])
def test_stretches_of_a_text_hold_its_mean(characters: int, number: int) -> None:
    """Losses that drift along one text, over some thousands of tokens, as those of real novels do."""
    rng = np.random.default_rng(7)
    slow = np.convolve(rng.normal(size=characters // 3200 + 20), np.ones(20) / 20**0.5, "valid")
    losses = rng.gamma(1, 3, size=characters // 3) + 0.4 * np.interp(
        np.arange(characters // 3), np.linspace(0, characters // 3, len(slow)), slow
    )
    stretches, _, units = script("coverage").of_regions(losses, characters, TRIALS)
    assert stretches >= 0.92
    assert units == number
