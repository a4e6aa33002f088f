"""Measure how often a report on text has a wrong word, on simulated reports.

    python scripts/wrong_words.py

In each report six encodings are exactly where no word is true: equal to the reference
at the training length and in their rises, rises of 0.05 nats, gains of 0.02, losses
equal to both readers'. Every word that `results.words` then says is wrong. Losses have
an effect of the seed, one of the document, and noise. tests/test_words.py asserts the
figures.
"""

import itertools
import math
from collections.abc import Callable

import numpy as np
import typer
from numpy.typing import NDArray

from posbench.estimate import Estimate, Floats, estimate
from posbench.results import words

Rng = np.random.Generator
ENCODINGS = 6
FAMILIES = ("differences", "holds", "uses", "gates")
OF_SEEDS = 0.03  # standard deviation over seeds of losses, gains and differences
OF_DOCUMENTS = 0.1
NOISE = 0.05  # of each seed on each document
ODD = 10  # standard deviations from the others to an odd seed


def _lognormal(rng: Rng, n: int) -> Floats:
    drawn = rng.lognormal(size=n) - math.exp(0.5)
    return drawn / math.sqrt((math.e - 1) * math.e)


def _two_groups(rng: Rng, n: int) -> Floats:
    return rng.choice([-1.0, 1.0], n) + 0.1 * rng.normal(size=n)


def _with_odd(rng: Rng, is_odd: NDArray[np.bool_]) -> Floats:
    """Return effects of seeds of which one in five is odd."""
    drawn = rng.normal(size=len(is_odd)) + ODD * (is_odd - 0.2)
    return drawn / math.sqrt(1 + ODD**2 * 0.2 * 0.8)


# Effects of n seeds of mean 0 and standard deviation 1.
SEEDS: dict[str, Callable[[Rng, int], Floats]] = {
    "normal": lambda rng, n: rng.normal(size=n),
    "exponential": lambda rng, n: rng.exponential(size=n) - 1,
    "lognormal": _lognormal,
    "two groups": _two_groups,
    "one of each five odd": lambda rng, n: _with_odd(rng, np.arange(n) % 5 == 0),
    "each odd in 1 of 5 cases": lambda rng, n: _with_odd(rng, rng.random(n) < 0.2),
}


def report(
    rng: Rng, kind: str, seeds: int, documents: int, of_rises: float
) -> dict[str, bool]:
    """Return which families have a wrong word in one report. `of_rises`: standard
    deviation of rises over seeds.
    """
    tokens = np.ones(documents)

    def losses(mean: float, of_seeds: float) -> Floats:
        by_seed = of_seeds * SEEDS[kind](rng, seeds)
        by_document = OF_DOCUMENTS * rng.normal(size=documents)
        noise = NOISE * rng.normal(size=(seeds, documents))
        return mean + by_seed[:, None] + by_document + noise

    def drawn(mean: float, of_seeds: float) -> Estimate:
        return estimate(losses(mean, of_seeds), tokens)

    wrong = dict.fromkeys(FAMILIES, False)
    alpha = words.adjusted(words.DIFFERENCES, 2 * (ENCODINGS - 1))
    for of_seeds in (OF_SEEDS, of_rises):
        reference = losses(0, of_seeds)
        for _ in range(ENCODINGS - 1):
            gap = estimate(losses(0, of_seeds) - reference, tokens)
            word = words.difference_word(gap, alpha, words.LEAST, ("less", "more"))
            wrong["differences"] |= word != words.NOT_RESOLVED

    for _ in range(ENCODINGS):
        rise = drawn(words.RISE_LIMIT, of_rises)
        alpha = words.adjusted(words.HOLDS, ENCODINGS)
        wrong["holds"] |= words.holds(rise, rise.seeds, alpha)

        gain = drawn(words.USES_LIMIT, OF_SEEDS)
        alpha = words.adjusted(words.USES, ENCODINGS)
        wrong["uses"] |= words.uses_more(gain, alpha)

        alpha = words.adjusted(words.GATES, 2 * ENCODINGS)
        for _ in range(2):
            word = words.beats_word(drawn(0, OF_SEEDS), alpha)
            wrong["gates"] |= word != words.NOT_RESOLVED
    return wrong


def rates(
    kind: str, seeds: int, documents: int, of_rises: float, reports: int
) -> dict[str, float]:
    """Return the share of reports with a wrong word, by family and in `any`."""
    rng = np.random.default_rng([len(kind), seeds, documents])
    drawn = [report(rng, kind, seeds, documents, of_rises) for _ in range(reports)]
    shares = {}
    for family in FAMILIES:
        shares[family] = sum(wrong[family] for wrong in drawn) / reports
    shares["any"] = sum(any(wrong.values()) for wrong in drawn) / reports
    return shares


def table(reports: int = 1000) -> None:
    """Print the share of reports with a wrong word."""
    heads = ["seeds are", "seeds", "documents", "rises vary by", *FAMILIES, "any"]
    print(f"| {' | '.join(heads)} |")
    print(f"|---{'|---:' * (len(heads) - 1)}|")
    sizes = ((5, 49), (5, 8), (10, 49))
    for kind, size, of_rises in itertools.product(SEEDS, sizes, (0.013, 0.15)):
        cells = [kind, *map(str, size), f"{of_rises:g}"]
        for share in rates(kind, *size, of_rises, reports).values():
            cells.append(f"{share:.1%}")
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    typer.run(table)
