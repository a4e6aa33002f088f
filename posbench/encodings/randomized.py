"""Randomized positions around another encoding.

Instead of 0 .. T-1, the inner encoding gets T of the numbers 0 .. M-1, drawn without replacement and sorted:

    positions = sort(sample of T from {0 .. M-1}),   one draw for the sequences of a batch

Short inputs thus show all the positions and distances of long ones. Evaluation draws positions too, with its own random
stream per window of text. With M = T this is the inner encoding.

Source: Ruoss et al., "Randomized Positional Encodings Boost Length Generalization of Transformers" (2023),
arXiv:2305.16843, section 3.
Beyond training length: defined up to M tokens, `max_length`, all of whose positions training has shown.
Checked against: the implementations that the inner encoding is checked against, at positions that jump.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from posbench.encodings._wrapper import NO_OPTIONS, Repositioned, build_inner
from posbench.encodings.base import Encoding, Shape, Stretch, check_length

_MOST_POSITIONS = 2**24  # whole numbers up to here differ in fp32; every draw orders all of them


class Randomized(Repositioned):
    def __init__(
        self,
        shape: Shape,
        inner: str = "rope",
        inner_options: dict[str, Any] = NO_OPTIONS,
        max_length: int | None = None,
    ) -> None:
        super().__init__(shape)
        self.range = 16 * shape.train_length if max_length is None else max_length
        most = max(_MOST_POSITIONS, 16 * shape.train_length)
        expected = f"at least train_length, {shape.train_length}, at most {most:,}, or null for 16 training lengths"
        self.expect(shape.train_length <= self.range <= most, "max_length", max_length, expected)
        # The inner encoding is trained on all these positions.
        reached = dataclasses.replace(shape, train_length=self.range)
        self.adopt([build_inner(inner, reached, inner_options, "encoding.inner_options")])

    def adopt(self, inners: Sequence[Encoding]) -> None:
        super().adopt(inners)
        self.max_length = self.range if self.max_length is None else min(self.range, self.max_length)
        self.length_dependent = True  # a longer input draws other positions

    def reached(self, inner: Encoding, stretch: Stretch) -> Stretch:
        return dataclasses.replace(stretch, train_length=inner.shape.train_length)  # the range

    def positions(self, ids: Tensor, generator: torch.Generator | None) -> Tensor:
        check_length(self, ids.shape[-1])
        stream = self.stream(ids, generator)
        drawn = torch.randperm(self.range, generator=stream, device=ids.device)[: ids.shape[-1]]
        return drawn.sort().values[None]
