"""Extensions of rotary encodings that give far pairs distances known from training.

Near pairs keep their logits, which order the words nearby. Each method has two or three score matrices and picks by
distance; all of them are computed in blocks of rows, O(block x length) in memory.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from posbench.encodings import _rotary as rotary
from posbench.encodings._rotary import PureRotary
from posbench.encodings.base import Encoding, Layer
from posbench.encodings.extend.stretch import Extended, Stretch, expect

# Maps positions (1|B, T) fp64 to those of the queries and to those of the keys in far pairs.
Far = Callable[[Tensor], tuple[Tensor, Tensor]]


class FarPairs(Encoding):
    """A rotary encoding, except that pairs at a distance of `near` or more are turned by positions from `far`."""

    def __init__(self, rope: PureRotary, near: int, far: Far) -> None:
        super().__init__(rope.shape)
        self.rope = rope
        self.near = near
        self.far = far

    def make_tables(self, positions: Tensor) -> Any:
        return self.rope.make_tables(positions)

    def prepare(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, ...]:
        far_q, far_k = self.far(rotary.exact(layer.positions))
        return self.rope.turned(q, far_q), self.rope.turned(k, far_k)

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        return self.rope.rotate(q, k, layer)

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        q, k = layer.state
        near = (layer.distance < self.near)[:, None]
        return torch.where(near, logits, _logits(q, k, layer) * self.logit_scale)


class DualChunk(Encoding):
    """A rotary encoding within chunks of `chunk` tokens; between chunks, queries get other positions.

    A key has the position n mod chunk. Let r be a query's place in its own chunk. For keys of the chunk before, its
    position is min(r + chunk, farthest), a true distance to the nearest. For earlier keys it is `farthest`.
    """

    def __init__(self, rope: PureRotary, chunk: int, farthest: int) -> None:
        super().__init__(rope.shape)
        self.rope = rope
        self.chunk = chunk
        self.farthest = farthest

    def make_tables(self, positions: Tensor) -> Any:
        return self.rope.make_tables(positions)

    def prepare(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, ...]:
        place = rotary.exact(layer.positions) % self.chunk
        after = (place + self.chunk).clamp(max=self.farthest)
        last = torch.full_like(place, self.farthest)
        return self.rope.turned(q, after), self.rope.turned(q, last), self.rope.turned(k, place)

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        return self.rope.rotate(q, k, layer)

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        after, last, k = layer.state
        queries = layer.positions[:, layer.rows][..., None]
        chunks = (queries // self.chunk - (queries - layer.distance) // self.chunk)[:, None]  # between query and key
        logits = torch.where(chunks == 1, _logits(after, k, layer) * self.logit_scale, logits)
        return torch.where(chunks > 1, _logits(last, k, layer) * self.logit_scale, logits)


def rerope(rope: PureRotary, stretch: Stretch, window: int | None = None) -> Extended:
    """ReRoPE: all distances from `window` on count as `window`.

    Source: Su, "ReRoPE" (2023), kexue.fm/archives/9708, github.com/bojone/rerope. The default window, a quarter of the
    training length, is that of the author's results (1024 of 4096); the optional log n scale of the logits is left out.
    """
    w = _window(window, stretch)

    def far(positions: Tensor) -> tuple[Tensor, Tensor]:
        return torch.full_like(positions, w), torch.zeros_like(positions)

    return FarPairs(rope, w, far), {"window": w, "dynamic": False}


def leaky_rerope(rope: PureRotary, stretch: Stretch, window: int | None = None, k: float | None = None) -> Extended:
    """Leaky ReRoPE: beyond `window`, k tokens count as one; the default k keeps all distances as trained.

    Source: Su, "Leaky ReRoPE" (2023), kexue.fm/archives/9708, github.com/bojone/rerope.
    """
    w = _window(window, stretch)
    slow = 1.0 if k is None else k
    if k is None and stretch.length > stretch.train_length:
        expect(w < stretch.train_length - 1, "window", w, f"less than {stretch.train_length - 1}, or k given as well")
        slow = (stretch.length - 1 - w) / (stretch.train_length - 1 - w)
    expect(1 <= slow < float("inf"), "k", slow, "a number of at least 1")

    def far(positions: Tensor) -> tuple[Tensor, Tensor]:
        return (positions + w * (slow - 1)) / slow, positions / slow

    return FarPairs(rope, w, far), {"window": w, "k": slow, "dynamic": k is None}


def self_extend(rope: PureRotary, stretch: Stretch, window: int | None = None, group: int | None = None) -> Extended:
    """Self-Extend: beyond `window`, positions are counted in groups; the default size keeps all distances as trained.

    Source: Jin et al., "LLM Maybe LongLM: Self-Extend LLM Context Window Without Tuning" (2024), arXiv:2401.01325.
    """
    w = _window(window, stretch)
    size = group or 1
    expect(group is None or group >= 1, "group", group, "at least 1, or null for the smallest that suffices")
    if group is None and stretch.length > stretch.train_length:
        expect(w < stretch.train_length, "window", w, f"less than {stretch.train_length}, or group given as well")
        last = stretch.length - 1
        size = next(g for g in itertools.count(1) if last // g + w - w // g < stretch.train_length)

    def far(positions: Tensor) -> tuple[Tensor, Tensor]:
        grouped = positions // size
        return grouped + (w - w // size), grouped

    return FarPairs(rope, w, far), {"window": w, "group": size, "dynamic": group is None}


def dual_chunk(rope: PureRotary, stretch: Stretch, chunk: int | None = None) -> Extended:
    """Dual chunk attention: true distances within a chunk and near its start, train_length - 1 to all far keys.

    Chunks hold 3/4 of the training length; the first train_length - chunk places of a chunk see the keys of the chunk
    before at true distances. Up to the training length it is plain RoPE.

    Source: An et al., "Training-Free Long-Context Scaling of Large Language Models" (2024), arXiv:2402.17463, section
    3. (The authors' code ends at position c where the paper, followed here, has c - 1.)
    """
    size = max(1, 3 * stretch.train_length // 4) if chunk is None else chunk
    expect(1 <= size <= stretch.train_length, "chunk", size, f"from 1 to the training length {stretch.train_length}")
    facts: dict[str, object] = {"chunk": size, "window": stretch.train_length - size, "dynamic": False}
    return DualChunk(rope, size, stretch.train_length - 1), facts


def _window(window: int | None, stretch: Stretch) -> int:
    w = max(1, stretch.train_length // 4) if window is None else window
    expect(w >= 1, "window", w, "at least 1, or null for a quarter of the training length")
    return w


def _logits(q: Tensor, k: Tensor, layer: Layer) -> Tensor:
    return (q[:, :, layer.rows] @ k[:, :, layer.keys].mT).float()
