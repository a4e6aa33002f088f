"""How often a report has a wrong word: simulated reports (scripts/wrong_words.py)."""

import numpy as np
import pytest
from support import script

from posbench.estimate import Estimate
from posbench.results import words

ODD = [0.01, 0.01, 0.02, 0.01, 0.2]  # five seeds whose mean is 0.05
ALIKE = [0.01, 0.01, 0.02, 0.01, 0.01]
APART = [-0.03, 0.04, -0.03, 0.04, 0.0]


def rise(seeds: list[float]) -> Estimate:
    return Estimate(float(np.mean(seeds)), 0.001, 4, tuple(seeds), 49)


def test_a_scheme_holds_where_its_seeds_agree():
    assert words.holds(rise(ALIKE), ALIKE, 0.01)
    assert not words.holds(rise(ODD), ODD, 0.01)
    assert not words.holds(rise(APART), APART, 0.01)
    assert words.holds(rise(2 * APART), 2 * APART, 0.01)  # ten show how they vary


def test_a_small_interval_over_seeds_and_documents_misses_as_rarely_as_it_says():
    """Satterthwaite's degrees of freedom would miss in .65 % of cases."""
    coverage = script("wrong_words")
    rng = np.random.default_rng(0)
    missed = 0
    for _ in range(4000):
        sums = 0.1 * rng.normal(size=(5, 1)) + 0.1 * rng.normal(size=49)
        sums = sums + 0.07 * rng.normal(size=(5, 49))
        made = coverage.estimate(sums, np.ones(49))
        missed += abs(made.mean) > made.half(0.002)
    assert missed / 4000 <= 0.004


RATES = [
    # seeds, of rises, most reports with any wrong word, with a wrong "holds"
    ("normal", 5, 0.013, 0.05, 0.02),
    ("normal", 5, 0.15, 0.05, 0.01),
    ("normal", 10, 0.15, 0.05, 0.02),
    ("one of each five odd", 5, 0.15, 0.05, 0.01),
    ("each odd in 1 of 5 cases", 5, 0.013, 0.06, 0.03),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "seeds", "of_rises", "most", "holds"), RATES)
def test_wrong_words_are_rare(kind, seeds, of_rises, most, holds):
    study = script("wrong_words")
    shares = study.rates(kind, seeds, 49, of_rises, reports=400)
    assert shares["any"] <= most
    assert shares["holds"] <= holds
