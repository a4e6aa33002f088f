"""Which tokens are scored, and with how much context: the definition of every
evaluation protocol.

`fixed_target` (headline): the same target tokens at every context length C; a window of
C tokens ends at its targets, so only the context differs. Differences between lengths
are paired by target. Below the training length a block of targets is scored in parts,
each at the end of its own window: every target has more than C / 2 tokens of context.
`nonoverlap` (common in papers): a span of text is cut into windows of C tokens, and all
C predictions are scored. Early tokens of a window have little context, so the
perplexity falls with C for any encoding that merely does not break.

A window reads C tokens and makes C predictions, the i-th (from 0) with i + 1 tokens of
context. Blocks of targets are dealt to documents in turn: a long document gets more
blocks than another only if the other has no text left. Intervals are over documents,
and evenly dealt blocks make the most of them. Source: Press et al. (2021),
arXiv:2108.12409, section 2 and appendix B for the early-token effect.
"""

import dataclasses
import hashlib
import itertools

import numpy as np
from numpy.typing import NDArray

from posbench.data.tokens import TokenSplit

Integers = NDArray[np.int64]

MIN_BLOCKS = 8  # fewer blocks say nothing about uncertainty: the row is `too_short`


@dataclasses.dataclass(frozen=True, eq=False)
class Windows:
    """Windows of one size: each reads `length` tokens and scores its last `scored`
    predictions.
    """

    length: int
    scored: int
    starts: Integers  # the first token of each window, as an index of the split's ids
    # the number, from 0 on, of the block that each window's targets belong to
    blocks: Integers
    # doc: no window crosses a document's end; concat: windows may
    documents: str


@dataclasses.dataclass(frozen=True)
class Targets:
    """Scored tokens, one entry of each array per token."""

    indices: Integers  # their places in the split's ids
    blocks: Integers
    context: Integers  # tokens before each target in its window

    def sha256(self, split: TokenSplit) -> str:
        """Return the digest of the scored tokens and of the blocks they form; rows that
        share it are paired.
        """
        order = np.argsort(self.indices)
        indices = self.indices[order]
        ids = np.asarray(split.ids[indices], dtype=np.int64)
        digest = hashlib.sha256()
        for part in (indices, self.blocks[order], ids):
            digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()


def targets_of(windows: Windows) -> Targets:
    """Return the targets of windows, in order."""
    offset = np.arange(windows.length - windows.scored + 1, windows.length + 1)
    return Targets(
        indices=(windows.starts[:, None] + offset).ravel(),
        blocks=np.repeat(windows.blocks, windows.scored),
        context=np.tile(offset, len(windows.starts)),
    )


def place_windows(
    protocol: str,
    split: TokenSplit,
    lengths: list[int],
    targets: int,
    blocks: int,
    documents: str,
    longest: int = 1,
    train_length: int = 1,
) -> dict[int, Windows]:
    """Return the windows of a protocol for every length for which the text has
    `MIN_BLOCKS` blocks.

    The targets are chosen for the longest length that the text allows, so that all
    lengths score the same tokens. That length is one of `lengths`, `longest`, or one of
    the halvings of `longest`. The targets depend on nothing but the text and these
    arguments: every run is scored on the same ones.

    Args:
        protocol: fixed_target or nonoverlap.
        lengths: context lengths in tokens, ascending.
        targets: target tokens per block of `fixed_target`.
        blocks: blocks wanted. `nonoverlap` takes a quarter as many spans, each as long
            as the longest length.
        documents: doc, concat, or auto, which is doc if that gives enough blocks at the
            longest length, else concat.
        longest: a length that the targets should allow, even if it is not evaluated.
        train_length: in tokens; shorter windows of `fixed_target` score a part of a
            block.
    """
    is_fixed = protocol == "fixed_target"  # else nonoverlap
    count = blocks if is_fixed else max(MIN_BLOCKS, blocks // 4)
    choices = ["doc", "concat"] if documents == "auto" else [documents]
    halvings = {longest >> times for times in range(longest.bit_length())}

    for reach in sorted({*lengths, *halvings}, reverse=True):
        if reach < train_length:
            break
        size = targets if is_fixed else reach  # of a block or a span
        for choice in choices:
            places = _places(split, choice, reach, size)
            firsts = _dealt_places(places, count)
            if len(firsts) < MIN_BLOCKS:
                continue

            windows = {}
            for length in lengths:
                if length > reach:
                    break
                scored = length
                if is_fixed:
                    scored = _scored(length, targets, train_length)
                parts = size // scored
                windows[length] = _windows(firsts, length, scored, parts, choice)
            return windows
    return {}


def _places(split: TokenSplit, documents: str, reach: int, size: int) -> list[Integers]:
    """Return where disjoint parts of `size` targets may begin, by stretch. Each ends a
    window of `reach` tokens; no window crosses an edge of a document, or of the text.
    """
    edges = np.asarray(split.starts)
    if documents == "concat":
        edges = edges[[0, -1]]
    places = []
    for first, end in itertools.pairwise(edges.tolist()):
        earliest = first + reach - size + 1
        places.append(np.arange(earliest, end - size + 1, size))
    return places


def _dealt_places(candidates: list[Integers], count: int) -> Integers:
    """Return `count` of the candidates: stretches of text take turns, and the places
    within each are spread evenly.

    Each stretch gets the same number, or all that it has. If the last round is too
    small for all stretches, it goes to some that are spread evenly over the text.
    """
    candidates = [places for places in candidates if len(places)]
    sizes = np.array([len(places) for places in candidates], dtype=np.int64)
    if sizes.sum() <= count:
        return np.concatenate([np.empty(0, np.int64), *candidates])

    rounds = 0
    while np.minimum(sizes, rounds + 1).sum() <= count:
        rounds += 1
    shares = np.minimum(sizes, rounds)
    larger = np.flatnonzero(sizes > rounds)
    left = count - int(shares.sum())
    shares[larger[_spread(len(larger), left)]] += 1

    dealt = []
    for places, share in zip(candidates, shares.tolist(), strict=True):
        dealt.append(places[_spread(len(places), share)])
    return np.concatenate(dealt)


def _spread(n: int, count: int) -> Integers:
    """Return `count` of n places, each in the middle of an equal share of them."""
    odd = 2 * np.arange(count, dtype=np.int64) + 1
    return odd * n // (2 * max(1, count))


def _scored(length: int, targets: int, train_length: int) -> int:
    """Return how many targets a window of `fixed_target` scores: a whole block, or in a
    short window the highest divisor of a block within half of it.
    """
    if length >= train_length:
        return targets
    part = min(targets, max(1, length // 2))
    while targets % part:
        part -= 1
    return part


def _windows(
    firsts: Integers, length: int, scored: int, parts: int, documents: str
) -> Windows:
    """Return windows that score `parts` times `scored` tokens from each of the first
    ones on.
    """
    ends = firsts[:, None] + scored * np.arange(1, parts + 1)  # (blocks, parts)
    return Windows(
        length=length,
        scored=scored,
        starts=ends.ravel() - 1 - length,
        blocks=np.repeat(np.arange(len(firsts)), parts),
        documents=documents,
    )
