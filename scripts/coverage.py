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
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import typer

from posbench.data import text
from posbench.estimate import (
    Estimate,
    Floats,
    Integers,
    estimate,
    units_of_text,
)
from posbench.evaluation import protocols

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
        nll = stored["nll"].astype(np.float64)
        documents = stored["document"].astype(np.int64)
        names = stored["scheme"]
    losses = nll[names == scheme]
    if less:
        losses = losses - nll[names == less]
    return losses.swapaxes(0, 1), documents


def _each_block(document: Integers) -> Integers:
    return np.arange(len(document))


def _each_document(document: Integers) -> Integers:
    return units_of_text(document, None)


def _segments(document: Integers) -> Integers:
    return units_of_text(np.zeros_like(document), None)


# By name: a function from the document of each block to its unit of text, and the
# number of seeds.
METHODS: dict[str, tuple[Callable[[Integers], Integers], int]] = {
    "one checkpoint, blocks": (_each_block, 1),
    "one checkpoint, documents": (_each_document, 1),
    "one checkpoint, segments (documents as chapters of one)": (_segments, 1),
    "five seeds, seeds": (np.zeros_like, 5),
    "five seeds, seeds and documents": (_each_document, 5),
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
    unit_of, seeds = METHODS[method]
    at = QUANTITIES.index(quantity)
    every_loss, document_of = whole
    losses = every_loss[at]  # (runs, blocks)
    blocks_of = [np.flatnonzero(document_of == n) for n in np.unique(document_of)]
    share = math.ceil(BLOCKS / documents)  # blocks per document, if it has that many

    # a document counts as often as a trial takes blocks from it
    sizes = [min(share, len(blocks)) for blocks in blocks_of]
    means = [losses[:, blocks].mean(1) for blocks in blocks_of]
    truths = np.average(means, axis=0, weights=sizes)  # (runs,)

    rng = np.random.default_rng([0, documents, seeds, at])
    hits = 0
    width = 0.0
    for _ in range(trials):
        runs = rng.integers(len(losses), size=seeds)
        drawn = rng.integers(len(blocks_of), size=documents)
        taken = [rng.permutation(blocks_of[number])[:share] for number in drawn]
        document = np.repeat(np.arange(documents), [len(blocks) for blocks in taken])
        nats = losses[runs[:, None], np.concatenate(taken)] * TARGETS
        interval = of_units(nats, unit_of(document))
        truth = truths[runs[0]] if seeds == 1 else truths.mean()
        hits += interval.low() <= truth <= interval.high()
        width += interval.half()
    return hits / trials, width / trials


def of_units(sums: Floats, unit: Integers) -> Estimate:
    """Return the interval over seeds, if there are several, and over units of text;
    `sums` is (seeds, blocks).
    """
    of_seeds = [np.bincount(unit, of_seed) for of_seed in sums]
    return estimate(np.stack(of_seeds), TARGETS * np.bincount(unit))


def table(losses: Path, trials: int = 2000) -> None:
    """Print how often each method's intervals contain the truth."""
    print(f"| figure | interval over | documents | {' | '.join(QUANTITIES)} |")
    print(f"{'|---' * 3}{'|---:' * 3}|")
    figures = ("rope", None), ("alibi", None), ("alibi", "rope")
    for scheme, less in figures:
        whole = population(losses, scheme, less)
        figure = f"{scheme} - {less}" if less else scheme
        for method, documents in itertools.product(METHODS, (8, 20, 60)):
            cells = [figure, method, str(documents)]
            for quantity in QUANTITIES:
                rate, width = coverage(whole, quantity, documents, method, trials)
                cells.append(f"{100 * rate:.1f} % ±{width:.3f}")
            print(f"| {' | '.join(cells)} |", flush=True)


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
    stretches = text.stretches([characters], 30)["test"]
    n_tokens, n_stretches = len(losses), len(stretches)
    _, start, end = stretches[0]
    size = int((end - start) / characters * n_tokens)
    room = min(LONGEST, size // 2)
    spacing = np.arange(n_stretches) * n_tokens // n_stretches

    rng = np.random.default_rng(0)
    sums = np.concatenate([[0.0], losses.cumsum()])
    results = []
    for _ in range(trials):
        starts = spacing + rng.integers(n_tokens // n_stretches - size + 1)
        places = [np.arange(s + room, s + size - TARGETS + 1, TARGETS) for s in starts]
        firsts = protocols._dealt_places(places, BLOCKS)
        stretch = np.searchsorted(starts, firsts, side="right") - 1
        unit = units_of_text(np.zeros(len(firsts), np.int64), stretch)
        interval = of_units((sums[firsts + TARGETS] - sums[firsts])[None], unit)

        rest = sums[-1] - (sums[starts + size] - sums[starts]).sum()
        truth = rest / (n_tokens - n_stretches * size)
        is_hit = interval.low() <= truth <= interval.high()
        results.append((is_hit, interval.half(), interval.units))
    share, width, units = np.mean(results, axis=0)
    return float(share), float(width), float(units)


if __name__ == "__main__":
    typer.run(table)
