"""How often posbench's 95 % intervals contain the truth, on losses of trained models.

    python scripts/coverage.py measure outputs/six/rope-s* outputs/six/alibi-s* --out tests/data/losses.npz
    python scripts/coverage.py table tests/data/losses.npz
    python scripts/coverage.py regions novels/*.txt

`measure` scores every long enough document of a corpus, in any split: blocks of targets at 1, 4 and 16 times the
training length, as in `fixed_target`. These documents are the population, and their mean is the truth. `table` draws
documents from it (and runs, as other seeds), places blocks as `fixed_target` does, and counts how often an interval
contains that mean. tests/test_coverage.py asserts the same figures.

`regions` is about a text in one document. Its losses are those of n-gram models of the other files, so that all of it
is unseen. A test part is drawn from it, the truth is the mean over the rest of this very text.
"""

import argparse
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from posbench import machine
from posbench.data import text
from posbench.data import tokens as data
from posbench.data.tokenizer import train_bpe
from posbench.data.tokens import Tokens, TokenSplit
from posbench.evaluation import protocols
from posbench.evaluation.models import TrainedGPT, score
from posbench.evaluation.ngrams import NGrams
from posbench.evaluation.protocols import Windows
from posbench.model.gpt import build
from posbench.results.estimate import Estimate, estimate, units_of_text
from posbench.run import checkpoint
from posbench.run.run import load_config

Floats = NDArray[np.float64]

RATIOS = (1, 4, 16)
MOST = 10  # blocks measured per document
BLOCKS = 128  # in a headline figure
TARGETS = 32  # tokens per block
QUANTITIES = ("1x", "rise 4x", "rise 16x")


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure(folders: list[Path], out: Path) -> None:
    """Write, for every run, nll per block at 1x and its rises at 4x and 16x, and the document of each block."""
    config = load_config(folders[0])
    tokens = data.prepare(config.data, data.cache_folder(config.runtime.cache))
    splits = (tokens.train, tokens.validation, tokens.test)
    longest = RATIOS[-1] * config.training.train_length
    placed = [list(_placed(split.starts, longest)) for split in splits]
    sizes = np.cumsum([0, *(len(starts) for starts in placed)])
    document = [np.full(len(f), i + d) for i, each in zip(sizes, placed, strict=False) for d, f in enumerate(each)]
    texts = [(split, np.concatenate(each)) for split, each in zip(splits, placed, strict=True) if each]
    found = []
    for folder in folders:
        subject = _subject(folder, tokens)
        found.append(np.concatenate([_losses(subject, split, firsts) for split, firsts in texts], axis=1))
        print(folder.name, found[-1].mean(1).round(3), flush=True)
    nll = np.stack(found)  # (runs, ratios, blocks)
    nll[:, 1:] -= nll[:, :1]  # rises, which are small, keep more digits
    schemes = [load_config(folder).encoding.name for folder in folders]
    np.savez_compressed(
        out, nll=nll.astype(np.float16), document=np.concatenate(document).astype(np.uint16), scheme=np.array(schemes)
    )


def _placed(starts: NDArray[np.int64], longest: int) -> Iterator[NDArray[np.int64]]:
    """First targets of at most `MOST` evenly spread blocks, for every document with two or more."""
    for first, end in itertools.pairwise(starts):
        candidates = np.arange(first + longest - TARGETS + 1, end - TARGETS + 1, TARGETS)
        if len(candidates) >= 2:
            n = min(MOST, len(candidates))
            yield candidates[(2 * np.arange(n) + 1) * len(candidates) // (2 * n)]


def _subject(folder: Path, tokens: Tokens) -> TrainedGPT:
    config = load_config(folder)
    model = build(config, tokens.tokenizer.vocab_size, tokens.tokenizer.texts)
    model.load_state_dict(checkpoint.trained(folder).weights())
    device = machine.resolve("auto")
    dtype = machine.resolve_precision(config.training.precision, device)
    return TrainedGPT(model.to(device).eval(), folder.name, config.training.train_length, device, dtype, config.seed)


def _losses(subject: TrainedGPT, split: TokenSplit, firsts: NDArray[np.int64]) -> Floats:
    """(ratios, blocks) nats per token."""
    length, block = subject.train_length, np.arange(len(firsts))
    each = [Windows(r * length, TARGETS, firsts + TARGETS - 1 - r * length, block, "doc") for r in RATIOS]
    with torch.no_grad():
        return np.stack([score(subject, split, windows, 16384).mean(1) for windows in each])


# -- simulating --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Population:
    """Measured losses (runs, blocks) of each quantity, one run per seed; blocks are sorted by document."""

    values: dict[str, Floats]
    document: NDArray[np.int64]

    @property
    def blocks_of(self) -> list[NDArray[np.int64]]:
        return [np.flatnonzero(self.document == d) for d in np.unique(self.document)]


def population(path: Path, scheme: str, less: str | None = None) -> Population:
    """The population of a scheme, or of its paired difference from another."""
    with np.load(path) as held:
        nll, names = held["nll"].astype(np.float64), held["scheme"]
        values = nll[names == scheme] - (nll[names == less] if less else 0.0)
        return Population(dict(zip(QUANTITIES, values.swapaxes(0, 1), strict=True)), held["document"].astype(np.int64))


Method = Callable[[Floats, NDArray[np.int64]], Estimate]  # of nats (seeds, blocks), and the document of each block


def coverage(
    whole: Population, quantity: str, documents: int, seeds: int, method: Method, trials: int, seed: int = 0
) -> tuple[float, float]:
    """Share of trials whose interval contains the truth, and the mean half width.

    Args:
        documents: number drawn with replacement, as from all possible test texts.
        seeds: runs drawn with replacement; 1: that one checkpoint's mean is the truth.
    """
    rng = np.random.default_rng([seed, documents, seeds, QUANTITIES.index(quantity)])
    values, blocks_of = whole.values[quantity], whole.blocks_of
    share = -(-BLOCKS // documents)  # blocks per document, if it has that many
    weight = np.array([min(share, len(blocks)) for blocks in blocks_of], dtype=np.float64)
    means = np.stack([values[:, blocks].mean(1) for blocks in blocks_of], axis=1)  # (runs, documents)
    truths = means @ weight / weight.sum()
    hits, width = 0, 0.0
    for _ in range(trials):
        runs = rng.integers(len(values), size=seeds)
        drawn = rng.integers(len(blocks_of), size=documents)
        taken = [rng.permutation(blocks_of[d])[:share] for d in drawn]
        document = np.repeat(np.arange(documents), [len(blocks) for blocks in taken])
        index = np.concatenate(taken)
        made = method(values[runs[:, None], index] * TARGETS, document)
        truth = truths[runs[0]] if seeds == 1 else truths.mean()
        hits += made.low() <= truth <= made.high()
        width += made.half()
    return hits / trials, width / trials


def by_unit(sums: Floats, unit: NDArray[np.int64]) -> Estimate:
    """The interval over seeds, if there are several, and over units of text."""
    summed = np.stack([np.bincount(unit, of_seed) for of_seed in sums])
    return estimate(summed, TARGETS * np.bincount(unit))


def by_document(sums: Floats, document: NDArray[np.int64]) -> Estimate:
    return by_unit(sums, units_of_text(document, None))


def by_block(sums: Floats, document: NDArray[np.int64]) -> Estimate:
    """An earlier method of posbench: every block is a unit, regardless of its document."""
    return by_unit(sums, np.arange(len(document)))


def of_one_text(sums: Floats, document: NDArray[np.int64]) -> Estimate:
    """Treats the documents as chapters of one document: segments."""
    return by_unit(sums, units_of_text(np.zeros_like(document), None))


def over_seeds(sums: Floats, document: NDArray[np.int64]) -> Estimate:
    """Another earlier method: seeds vary, the text does not."""
    return by_unit(sums, np.zeros_like(document))


METHODS: dict[str, tuple[Method, int]] = {
    "one checkpoint, blocks": (by_block, 1),
    "one checkpoint, documents": (by_document, 1),
    "one checkpoint, segments (documents as chapters of one)": (of_one_text, 1),
    "five seeds, seeds": (over_seeds, 5),
    "five seeds, seeds and documents": (by_document, 5),
}


def table(path: Path, trials: int) -> None:
    print("| figure | interval over | documents | " + " | ".join(QUANTITIES) + " |")
    print("|---" * 3 + "|---:" * 3 + "|")
    for name, whole in _populations(path):
        for method, (made, seeds) in METHODS.items():
            for documents in (8, 20, 60):
                each = [coverage(whole, q, documents, seeds, made, trials) for q in QUANTITIES]
                shown = " | ".join(f"{100 * rate:.1f} % ±{width:.3f}" for rate, width in each)
                print(f"| {name} | {method} | {documents} | {shown} |", flush=True)


def _populations(path: Path) -> Iterator[tuple[str, Population]]:
    for scheme, less in (("rope", None), ("alibi", None), ("alibi", "rope")):
        yield f"{scheme} - {less}" if less else scheme, population(path, scheme, less)


# -- contiguous regions of one text ------------------------------------------------------------------------------------

LONGEST = 1024  # tokens of context before the first target of a stretch


def losses_of(file: Path, others: list[Path]) -> tuple[Floats, int]:
    """(2, tokens) nats of the 5-gram model of the other files, and that less the bigram's; characters of the text."""
    texts = [path.read_text(encoding="utf-8") for path in (*others, file)]
    tokenizer = train_bpe(texts[:-1], 2048)
    *known, own = (np.concatenate(list(tokenizer.encode([text]))).astype(np.int64) for text in texts)
    ids = np.concatenate(known)
    models = NGrams(ids, np.array([[0, len(ids)]]), tokenizer.vocab_size)
    places = np.arange(4, len(own))
    nll = models.nll(np.stack([own[places - back] for back in (4, 3, 2, 1)], 1), own[places])
    return np.stack([nll[4], nll[4] - nll[1]]), len(texts[-1])


def drawn(tokens: int, characters: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """First token and end of each stretch of a test part that begins anywhere, of the sizes of `posbench.data.text`."""
    spans, _ = text._stretches([characters], 30)
    number = len(spans["test"])
    _, start, end = spans["test"][0]
    size = int((end - start) / characters * tokens)
    shift = int(rng.integers(tokens // number - size + 1))
    return [(i * tokens // number + shift, i * tokens // number + shift + size) for i in range(number)]


def of_regions(losses: Floats, characters: int, trials: int, seed: int = 0) -> tuple[float, float, float]:
    """Share of trials whose interval contains the mean of the rest of the text, mean half width, mean units.

    Args:
        losses: (tokens,) nats of every token of the text.
    """
    rng = np.random.default_rng(seed)
    sums = np.concatenate([[0.0], losses.cumsum()])
    hits, width, units = 0, 0.0, 0
    for _ in range(trials):
        pieces = drawn(len(losses), characters, rng)
        room = min(LONGEST, (pieces[0][1] - pieces[0][0]) // 2)
        candidates = [np.arange(first + room, end - TARGETS + 1, TARGETS) for first, end in pieces]
        firsts = protocols._dealt(candidates, BLOCKS)
        stretch = np.searchsorted([first for first, _ in pieces], firsts, side="right") - 1
        unit = units_of_text(np.zeros(len(firsts), np.int64), stretch)
        made = by_unit((sums[firsts + TARGETS] - sums[firsts])[None], unit)
        inside = sum(sums[end] - sums[first] for first, end in pieces)
        truth = (sums[-1] - inside) / (len(losses) - sum(end - first for first, end in pieces))
        hits += made.low() <= truth <= made.high()
        width += made.half()
        units += made.units
    return hits / trials, width / trials, units / trials


def regions(paths: list[Path], trials: int) -> None:
    quantities = ("nll", "nll less that of a bigram model")
    found: dict[str, list[tuple[float, float, float]]] = {quantity: [] for quantity in quantities}
    for path in paths:
        losses, characters = losses_of(path, [other for other in paths if other != path])
        for quantity, of_quantity in zip(quantities, losses, strict=True):
            found[quantity].append(of_regions(of_quantity, characters, trials))
            print(path.name, quantity, *np.round(found[quantity][-1], 3), flush=True)
    print("| figure | segments | contains the truth | lowest of the texts | half width |\n|---|---:|---:|---:|---:|")
    for quantity, each in found.items():
        rates, widths, units = np.array(each).T
        print(f"| {quantity} | {units.mean():.0f} | {rates.mean():.1%} | {rates.min():.1%} | ±{widths.mean():.3f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measured = commands.add_parser("measure")
    measured.add_argument("runs", nargs="+", type=Path)
    measured.add_argument("--out", type=Path, required=True)
    shown = commands.add_parser("table")
    shown.add_argument("losses", type=Path)
    shown.add_argument("--trials", type=int, default=2000)
    cut = commands.add_parser("regions")
    cut.add_argument("texts", nargs="+", type=Path)
    cut.add_argument("--trials", type=int, default=1000)
    asked = parser.parse_args()
    if asked.command == "measure":
        measure(asked.runs, asked.out)
    elif asked.command == "regions":
        regions(asked.texts, asked.trials)
    else:
        table(asked.losses, asked.trials)
