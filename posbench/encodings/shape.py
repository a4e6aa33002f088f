"""Shifted absolute positions (SHAPE) around another encoding, so that it cannot rely on where a text begins.

In training, one random number shifts all positions. In evaluation the shift is fixed, one more than the largest random
one:

    positions = o, o + 1, o + 2 ..   o drawn from 0 .. shift-1 in training,   o = shift in evaluation

All sequences of a batch share one draw here, as in `randomized`; in the authors' code each has its own. This changes
nothing for an encoding that depends on distances alone.

Source: Kiyono et al., "SHAPE: Shifted Absolute Position Embedding for Transformers" (2021), arXiv:2109.05644, and the
authors' code (butsugiri/shape), whose shift of 500, for sentences, does not grow with the training length.
Beyond training length: defined as far as the encoding inside, which is made for train_length + shift positions.
Checked against: what the encoding inside is checked against.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from posbench.encodings._wrapper import NO_OPTIONS, Repositioned, build_inner
from posbench.encodings.base import Encoding, Shape, Stretch, check_length

_MOST_POSITIONS = 2**24  # whole numbers up to here differ in fp32


class SHAPE(Repositioned):
    def __init__(
        self,
        shape: Shape,
        inner: str = "sinusoidal",
        inner_options: dict[str, Any] = NO_OPTIONS,
        shift: int = 500,
    ) -> None:
        super().__init__(shape)
        self.expect(1 <= shift <= _MOST_POSITIONS, "shift", shift, f"a number of tokens from 1 to {_MOST_POSITIONS:,}")
        self.shift = shift
        reached = dataclasses.replace(shape, train_length=shape.train_length + shift)
        self.adopt([build_inner(inner, reached, inner_options, "encoding.inner_options")])

    def adopt(self, inners: Sequence[Encoding]) -> None:
        super().adopt(inners)
        if self.max_length is not None:
            self.max_length -= self.shift

    def reached(self, inner: Encoding, stretch: Stretch) -> Stretch:
        if "embed" not in inner.hooks:  # distances stay those of the input
            return stretch
        return Stretch(stretch.train_length + self.shift, stretch.length + self.shift)

    def positions(self, ids: Tensor, generator: torch.Generator | None) -> Tensor:
        check_length(self, ids.shape[-1])
        places = torch.arange(ids.shape[-1], device=ids.device)[None]
        if not self.training:
            return places + self.shift
        stream = self.stream(ids, generator)
        return places + torch.randint(self.shift, (1, 1), generator=stream, device=ids.device)
