"""The words of a report on text: each a function of estimates alone.

A whole report has a wrong word in at most 5 % of cases with ordinary seeds
(scripts/wrong_words.py simulates them). The 5 % are split over four families of words,
and each share is divided by the number of words of its family (Bonferroni). "Resolved"
means one thing: the adjusted interval, over seeds and documents, decides.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from posbench.estimate import MANY_SEEDS, Estimate

RISE_LIMIT = 0.05  # nats per token that a context may add where a scheme still holds
USES_LIMIT = 0.02  # nats per token that a used context gains at least
LEAST = 0.02  # nats per token: a smaller difference has no word
# Nats per token: the most that rises of fewer than `MANY_SEEDS` seeds may vary, as
# standard deviation, where a scheme holds.
AGREEMENT = 0.03
NOT_RESOLVED: Final = "not resolved"

# How often each family may have a wrong word in a report.
DIFFERENCES = 0.02  # two a scheme but the reference
HOLDS = 0.01  # one a scheme
USES = 0.01
GATES = 0.01  # two a scheme: learned, and beats a reader of its window


def adjusted(family: float, words: int) -> float:
    """Return the level of one word of a family that may say so many."""
    return family / max(1, words)


def difference_word(
    gap: Estimate, alpha: float, least: float, words: tuple[str, str]
) -> str:
    """Return the first of two words if a difference is below 0, the second if above."""
    if gap.high(alpha) < 0 and gap.mean <= -least:
        return words[0]
    if gap.low(alpha) > 0 and gap.mean >= least:
        return words[1]
    return NOT_RESOLVED


def beats_word(above: Estimate, alpha: float) -> str:
    """Tell whether a loss is below a reader's, from how far it is above: yes, no or not
    resolved.
    """
    if above.high(alpha) < 0:
        return "yes"
    if above.low(alpha) > 0:
        return "no"
    return NOT_RESOLVED


def holds(rise: Estimate, seeds: Sequence[float], alpha: float) -> bool:
    """Tell whether a context adds at most `RISE_LIMIT`: the upper bound of its rise
    (one-sided), and the rise of each seed.

    A bound from few seeds does not see that seeds may lie far apart, so that they must
    also agree.
    """
    if not rise.high(2 * alpha) <= RISE_LIMIT or max(seeds) > RISE_LIMIT:
        return False
    if 1 < len(seeds) < MANY_SEEDS:
        return bool(np.std(seeds, ddof=1) <= AGREEMENT)
    return True


def uses_more(gain: Estimate, alpha: float) -> bool:
    """Tell whether a scheme uses more than a shorter context, from what the training
    length gains over it: its lower bound, one-sided.
    """
    return gain.low(2 * alpha) > USES_LIMIT
