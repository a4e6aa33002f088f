"""Extensions of rotary encodings that give far pairs distances known from training.

Each method has two or three score matrices and picks by distance, in blocks of rows. Near pairs keep their logits.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from posbench.encodings.base import Encoding, Extended, Layer, Stretch, expect, part_of
from posbench.encodings.rope import PureRotary, double, turn
from posbench.options import AtLeast1, Count

# From positions (1|B, T) fp64 to those of the queries and of the keys, for each kind of far pairs.
Far = Callable[[Tensor], list[tuple[Tensor, Tensor]]]


class FarPairs(Encoding):
    """A rotary encoding whose pairs of kind 1, 2 .. are turned by other positions; those of kind 0 are near."""

    def __init__(self, rope: PureRotary, far: Far, kind: int | Callable[[Layer], Tensor]) -> None:
        super().__init__(rope.shape)
        self.rope, self.far = rope, far
        self.kind = kind  # of the pairs at hand: (1|B, Tq, Tk); a number: 1 from this distance on

    def make_tables(self, positions: Tensor) -> Any:
        return self.rope.make_tables(positions)

    def prepare(self, q: Tensor, k: Tensor, layer: Layer) -> list[tuple[Tensor, Tensor]]:
        far = [[self.rope.make_tables(each) for each in pair] for pair in self.far(double(layer.positions))]
        return [(turn(q, of_q, self.rope.layout), turn(k, of_k, self.rope.layout)) for of_q, of_k in far]

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        return self.rope.rotate(q, k, layer)

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        kind = (layer.distance >= self.kind).long() if isinstance(self.kind, int) else self.kind(layer)
        for number, (of_q, of_k) in enumerate(layer.state, 1):
            far = part_of(of_q, layer.rows) @ part_of(of_k, layer.keys).mT * self.logit_scale
            logits = torch.where(kind[:, None] == number, far, logits)
        return logits


def rerope(rope: PureRotary, stretch: Stretch, window: Count | None = None) -> Extended:
    """ReRoPE: all distances from `window`, by default a quarter of the training length, on count as `window`.

    Source: Su, "ReRoPE" (2023), kexue.fm/archives/9708, github.com/bojone/rerope, without its log n scale.
    """
    w = window or max(1, stretch.train_length // 4)
    return FarPairs(rope, lambda i: [(torch.full_like(i, w), torch.zeros_like(i))], w), {"window": w, "dynamic": False}


def string(rope: PureRotary, stretch: Stretch, shift: Count | None = None, local: Count | None = None) -> Extended:
    """STRING: distances from `shift`, by default a third of the training length, on count from `local` on again.

    Source: An et al., "Why Does the Effective Context Length of LLMs Fall Short?" (2024), arXiv:2410.18745, section 4,
    where `local` is 128; here a quarter of the shift if that is less.
    """
    s = shift or max(1, stretch.train_length // 3)
    w = local or min(128, max(1, s // 4))
    return FarPairs(rope, lambda i: [(i - s + w, i)], s), {"shift": s, "local": w, "dynamic": False}


def leaky_rerope(
    rope: PureRotary, stretch: Stretch, window: Count | None = None, k: AtLeast1 | None = None
) -> Extended:
    """Leaky ReRoPE: beyond `window`, k tokens count as one; the default k keeps all distances as trained.

    Source: Su, "Leaky ReRoPE" (2023), kexue.fm/archives/9708, github.com/bojone/rerope.
    """
    w = window or max(1, stretch.train_length // 4)
    slow, last = k or 1.0, stretch.train_length - 1
    if k is None and stretch.length > stretch.train_length:
        expect(w < last, "window", w, f"less than {last}, or k given as well")
        slow = (stretch.length - 1 - w) / (last - w)
    facts = {"window": w, "k": slow, "dynamic": k is None}
    return FarPairs(rope, lambda i: [((i + w * (slow - 1)) / slow, i / slow)], w), facts


def self_extend(
    rope: PureRotary, stretch: Stretch, window: Count | None = None, group: Count | None = None
) -> Extended:
    """Self-Extend: beyond `window`, positions are counted in groups; the default size keeps all distances as trained.

    Source: Jin et al., "LLM Maybe LongLM: Self-Extend LLM Context Window Without Tuning" (2024), arXiv:2401.01325.
    """
    w = window or max(1, stretch.train_length // 4)
    size, last = group or 1, stretch.length - 1
    if group is None and stretch.length > stretch.train_length:
        expect(w < stretch.train_length, "window", w, f"less than {stretch.train_length}, or group given as well")
        size = next(g for g in itertools.count(1) if last // g + w - w // g < stretch.train_length)
    facts = {"window": w, "group": size, "dynamic": group is None}
    return FarPairs(rope, lambda i: [(i // size + (w - w // size), i // size)], w), facts


def dual_chunk(rope: PureRotary, stretch: Stretch, chunk: Count | None = None) -> Extended:
    """Dual chunk attention: true distances within a chunk and near its start, train_length - 1 to all far keys.

    Chunks hold 3/4 of the training length L. A key has the position n mod chunk. To keys of the chunk before, a query
    at place r of its chunk has the position min(r + chunk, L - 1), to earlier keys L - 1.

    Source: An et al. (2024), arXiv:2402.17463, 3, which has L - 1 where the authors' code has L.
    """
    size, longest = chunk or max(1, 3 * stretch.train_length // 4), stretch.train_length
    expect(size <= longest, "chunk", size, f"from 1 to the training length {longest}")

    def far(positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        place = positions % size
        return [((place + size).clamp(max=longest - 1), place), (torch.full_like(place, longest - 1), place)]

    def chunks_from_key_to_query(layer: Layer) -> Tensor:
        queries = layer.positions[:, layer.rows][..., None]
        return (queries // size - (queries - layer.distance) // size).clamp(max=2)

    return FarPairs(rope, far, chunks_from_key_to_query), {"chunk": size, "window": longest - size, "dynamic": False}
