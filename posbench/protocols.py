"""Which tokens are scored, and with how much context: the definition of every evaluation protocol.

`fixed_target` (headline): the same target tokens at every context length C; a window of C tokens ends at its targets,
so only the context differs. Differences between lengths are paired by target.
`nonoverlap` (what papers print): a span of text cut into windows of C tokens, all C predictions scored. Early tokens
of a window have little context, so its perplexity falls with C for any scheme that merely does not break.

A window reads C tokens and makes C predictions, the i-th (from 0) with i + 1 tokens of context. Sources: Press et al.
(2021), arXiv:2108.12409, section 2 and appendix B for the early-token effect.
"""

import dataclasses
import hashlib
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from posbench.data.tokens import TokenSplit

Integers = NDArray[np.int64]
Boundaries = Literal["doc", "concat"]

MIN_BLOCKS = 8  # fewer say nothing about uncertainty: the row is `too_short`


@dataclasses.dataclass(frozen=True)
class Windows:
    """The windows of one cell: each reads `length` tokens and scores its last `scored` predictions."""

    length: int
    scored: int
    starts: Integers  # first token of each window, into the split's ids
    blocks: Integers  # the block of text each window's targets belong to, 0 .. n_blocks-1
    documents: Boundaries  # doc: no window crosses a document's end; concat: windows may

    @property
    def n_blocks(self) -> int:
        return int(self.blocks[-1]) + 1

    def targets(self) -> Integers:
        """Indices of the scored tokens: (windows, scored)."""
        return self.starts[:, None] + self.length - self.scored + 1 + np.arange(self.scored)

    def mean_context(self, window: int | None = None) -> float:
        """Mean number of tokens before a target that its prediction may look at directly."""
        context = np.arange(self.length - self.scored + 1, self.length + 1)
        return float(np.minimum(context, window or self.length).mean())

    def targets_sha256(self, split: TokenSplit) -> str:
        """Identity of the scored tokens and of the blocks they form; rows that share it are paired."""
        targets = self.targets()
        order = np.argsort(targets, axis=None)
        blocks = np.broadcast_to(self.blocks[:, None], targets.shape).ravel()[order]
        flat = targets.ravel()[order]
        digest = hashlib.sha256()
        for part in (flat, blocks, np.asarray(split.ids[flat], dtype=np.int64)):
            digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()


def plan(
    protocol: str, split: TokenSplit, lengths: list[int], targets: int, blocks: int, documents: str
) -> dict[int, Windows | None]:
    """Windows of a protocol for every length, None where the text is too short for `MIN_BLOCKS` blocks.

    The targets are chosen for the longest length that the text allows, so that all lengths score the same tokens.
    They depend on nothing but the text and these arguments: every run is scored on the same ones.

    Args:
        lengths: context lengths in tokens, ascending.
        targets: target tokens per block of `fixed_target`.
        blocks: blocks wanted; `nonoverlap` takes a quarter as many spans, each as long as the longest length.
        documents: doc, concat, or auto = doc where that gives enough blocks at the longest length, else concat.
    """
    choices: list[Boundaries] = ["doc", "concat"] if documents == "auto" else [documents]  # type: ignore[list-item]
    for longest in reversed(lengths):
        for boundaries in choices:
            ends = _spans(split, boundaries)
            if protocol == "fixed_target":
                found = _fixed_target(ends, longest, targets, blocks)
            else:
                found = _nonoverlap(ends, longest, max(MIN_BLOCKS, blocks // 4))
            if len(found) >= MIN_BLOCKS:
                cut = _cut_fixed_target if protocol == "fixed_target" else _cut_nonoverlap
                return {c: cut(found, c, longest, targets, boundaries) if c <= longest else None for c in lengths}
    return dict.fromkeys(lengths)


def _spans(split: TokenSplit, boundaries: Boundaries) -> Integers:
    """(n, 2) first token and end of each stretch of text that a window may not leave."""
    starts = np.asarray(split.starts, dtype=np.int64)
    if boundaries == "concat":
        return np.array([[0, starts[-1]]], dtype=np.int64)
    return np.stack([starts[:-1], starts[1:]], axis=1)


def _fixed_target(spans: Integers, longest: int, targets: int, wanted: int) -> Integers:
    """First tokens of disjoint target blocks that have the longest context before them, evenly spread."""
    found = [
        np.arange(first + longest - targets + 1, end - targets + 1, targets)
        for first, end in spans
        if end - first > longest
    ]
    return _spread(np.concatenate(found) if found else np.empty(0, np.int64), wanted)


def _nonoverlap(spans: Integers, longest: int, wanted: int) -> Integers:
    """First tokens of disjoint stretches of `longest` inputs and one more label, evenly spread."""
    found = [np.arange(first, end - longest, longest) for first, end in spans if end - first > longest]
    return _spread(np.concatenate(found) if found else np.empty(0, np.int64), wanted)


def _spread(candidates: Integers, wanted: int) -> Integers:
    if len(candidates) <= wanted:
        return candidates
    return candidates[np.linspace(0, len(candidates) - 1, wanted).astype(np.int64)]


def _cut_fixed_target(found: Integers, length: int, longest: int, targets: int, boundaries: Boundaries) -> Windows:
    starts = found + targets - 1 - length
    return Windows(length, min(targets, length), starts, np.arange(len(found)), boundaries)


def _cut_nonoverlap(found: Integers, length: int, longest: int, targets: int, boundaries: Boundaries) -> Windows:
    per_span = longest // length
    starts = (found[:, None] + length * np.arange(per_span)).ravel()
    return Windows(length, length, starts, np.repeat(np.arange(len(found)), per_span), boundaries)
