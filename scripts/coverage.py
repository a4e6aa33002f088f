"""Measure how often posbench's 95 % intervals contain the truth, on losses of trained
models.

    python scripts/coverage.py tests/data/losses.npz

That file has the losses of ten runs (measured by this script at commit a3717f3c) on
every long enough document of a
corpus: blocks of targets at 1, 4 and 16 times the training length, as in
`fixed_target`. These documents are the population, and their mean is the truth. Each
trial draws documents (and runs, as other seeds) and places blocks as `fixed_target`
does; its interval may contain that mean. tests/test_intervals.py asserts the figures.
"""

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import typer

from posbench.data import text
from posbench.evaluation import protocols
from posbench.results.estimate import (
    Estimate,
    Floats,
    Integers,
    estimate,
    units_of_text,
)

QUANTITIES = ("1x", "rise 4x", "rise 16x")
BLOCKS = 128  # in a headline figure
TARGETS = 32  # tokens per block
LONGEST = 1024  # tokens of context before the first target of a stretch


def population(
    path: Path, scheme: str, less: str | None = None
) -> tuple[Floats, Integers]:
    """Return the losses of a scheme, or its paired difference from another:
    (quantities, runs, blocks), documents.
    """
    with np.load(path) as stored:
        nll, names = stored["nll"].astype(np.float64), stored["scheme"]
        losses = nll[names == scheme] - (nll[names == less] if less else 0.0)
        return losses.swapaxes(0, 1), stored["document"].astype(np.int64)


# By name: a function from the document of each block to its unit of text, and the
# number of seeds.
METHODS: dict[str, tuple[Callable[[Integers], Integers], int]] = {
    "one checkpoint, blocks": (lambda document: np.arange(len(document)), 1),
    "one checkpoint, documents": (lambda document: units_of_text(document, None), 1),
    "one checkpoint, segments (documents as chapters of one)": (
        lambda d: units_of_text(np.zeros_like(d), None),
        1,
    ),
    "five seeds, seeds": (np.zeros_like, 5),
    "five seeds, seeds and documents": (
        lambda document: units_of_text(document, None),
        5,
    ),
}


def coverage(
    whole: tuple[Floats, Integers],
    quantity: str,
    documents: int,
    method: str,
    trials: int,
) -> tuple[float, float]:
    """Return the share of trials whose interval contains the truth, and the mean half
    width.

    Args:
        whole: the population. Documents and runs are drawn from it with replacement, as
            from all possible test texts and seeds. The truth for one run is its own
            mean.
    """
    (unit, seeds), at = METHODS[method], QUANTITIES.index(quantity)
    rng, values = np.random.default_rng([0, documents, seeds, at]), whole[0][at]
    blocks_of = [np.flatnonzero(whole[1] == number) for number in np.unique(whole[1])]
    share = -(-BLOCKS // documents)  # blocks per document, if it has that many
    weight = np.array(
        [min(share, len(blocks)) for blocks in blocks_of], dtype=np.float64
    )
    # (runs, documents)
    means = np.stack([values[:, blocks].mean(1) for blocks in blocks_of], axis=1)
    truths = means @ weight / weight.sum()
    hits, width = 0, 0.0
    for _ in range(trials):
        runs, drawn = (
            rng.integers(len(values), size=seeds),
            rng.integers(len(blocks_of), size=documents),
        )
        taken = [rng.permutation(blocks_of[number])[:share] for number in drawn]
        document = np.repeat(np.arange(documents), [len(blocks) for blocks in taken])
        interval = of_units(
            values[runs[:, None], np.concatenate(taken)] * TARGETS, unit(document)
        )
        hits += (
            interval.low()
            <= (truths[runs[0]] if seeds == 1 else truths.mean())
            <= interval.high()
        )
        width += interval.half()
    return hits / trials, width / trials


def of_units(sums: Floats, unit: Integers) -> Estimate:
    """Return the interval over seeds, if there are several, and over units of text;
    `sums` is (seeds, blocks).
    """
    return estimate(
        np.stack([np.bincount(unit, of_seed) for of_seed in sums]),
        TARGETS * np.bincount(unit),
    )


def table(losses: Path, trials: int = 2000) -> None:
    """Print how often each method's intervals contain the truth."""
    print(
        f"| figure | interval over | documents | {' | '.join(QUANTITIES)}"
        f" |\n{'|---' * 3}{'|---:' * 3}|"
    )
    for (scheme, less), method, documents in itertools.product(
        (("rope", None), ("alibi", None), ("alibi", "rope")), METHODS, (8, 20, 60)
    ):
        whole = population(losses, scheme, less)
        rates = [
            coverage(whole, quantity, documents, method, trials)
            for quantity in QUANTITIES
        ]
        cells = " | ".join(f"{100 * rate:.1f} % ±{width:.3f}" for rate, width in rates)
        print(
            f"| {f'{scheme} - {less}' if less else scheme} | {method} | {documents} |"
            f" {cells} |",
            flush=True,
        )


def of_regions(
    losses: Floats, characters: int, trials: int
) -> tuple[float, float, float]:
    """Return the share of trials whose interval contains the mean of the rest of a
    text, mean half width, mean units.

    The text is one document. Each trial draws a test part from it; the truth is the
    mean over the rest.

    Args:
        losses: (tokens,) nats of every token of the text.
        characters: how many the text has. Stretches have the sizes of
            `posbench.data.text` and begin anywhere.
    """
    rng, sums = np.random.default_rng(0), np.concatenate([[0.0], losses.cumsum()])
    stretches = text.stretches([characters], 30)["test"]
    size, number = (
        int((stretches[0][2] - stretches[0][1]) / characters * len(losses)),
        len(stretches),
    )
    room, results = min(LONGEST, size // 2), []
    for _ in range(trials):
        shift = int(rng.integers(len(losses) // number - size + 1))
        starts = np.arange(number) * len(losses) // number + shift
        firsts = protocols._dealt_places(
            [np.arange(s + room, s + size - TARGETS + 1, TARGETS) for s in starts],
            BLOCKS,
        )
        unit = units_of_text(
            np.zeros(len(firsts), np.int64),
            np.searchsorted(starts, firsts, side="right") - 1,
        )
        interval = of_units((sums[firsts + TARGETS] - sums[firsts])[None], unit)
        rest = sums[-1] - (sums[starts + size] - sums[starts]).sum()
        truth = rest / (len(losses) - number * size)
        results.append(
            (
                interval.low() <= truth <= interval.high(),
                interval.half(),
                interval.units,
            )
        )
    share, width, units = np.mean(results, axis=0)
    return float(share), float(width), float(units)


if __name__ == "__main__":
    typer.run(table)
