"""How often a report says a wrong word where truths stand at the limits of its words, on losses of trained models."""

from pathlib import Path
from typing import Any

import pytest
from scipy import stats
from support import script

from posbench.report.comparison import claims

LOSSES = Path(__file__).parent / "data" / "losses.npz"
REPORTS = 60
MOST = stats.binom.ppf(0.999, REPORTS, claims.ALPHA) / REPORTS  # of a procedure that is wrong in one of twenty


def wrong(truth: str, **setting: Any) -> float:
    words = script("words")
    found = words.simulate(words.Population(LOSSES), words.TRUTHS[truth], words.Setting(5, **setting), REPORTS)
    return float(found.wrong)


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    "setting",
    [
        {"documents": 20},
        {"documents": 8},
        {"documents": 20, "equal": False},
        {"documents": 60, "kind": "t3"},
        {"documents": 60, "spread": 4.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("truth", ["all equal", "each at another limit"])
def test_one_report_in_twenty_has_a_wrong_word_at_most(truth: str, setting: dict[str, Any]) -> None:
    assert wrong(truth, **setting) <= MOST


@pytest.mark.full
@pytest.mark.parametrize("kind", ["one in ten", "one in five"])
def test_seeds_that_deviate_make_no_differences(kind: str) -> None:
    assert wrong("all equal", documents=20, kind=kind) <= MOST


@pytest.mark.full
def test_intervals_that_each_hold_in_19_of_20_cases_would_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "level", lambda *_: claims.ALPHA)
    assert wrong("all equal", documents=60) > MOST


def test_words_are_said_where_they_are_true_and_large() -> None:
    words = script("words")
    kinds = [words.Truth(0.2), words.Truth(-0.2, (0.0, 0.0)), words.Truth(0.0, (0.6, 1.2))]
    found = words.simulate(words.Population(LOSSES), kinds, words.Setting(6, 60), 10)
    worse, holds, more = found.words
    assert worse["worse 1x"] > 0.9 and worse["breaks at 256"] > 0.9
    assert holds["better 1x"] > 0.9 and holds["less 4x"] > 0.9
    assert more["worse 4x"] > 0.9
