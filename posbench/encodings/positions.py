"""Wrappers that give the inner encoding other positions than 0 .. T-1; all sequences of a batch share one draw."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from posbench.encodings.base import Encoding, Shape, Stretch, check_length
from posbench.encodings.wrapper import NO_OPTIONS, Wrapper
from posbench.errors import UserError
from posbench.options import AtLeast1, Count, NonNegative


class Repositioned(Wrapper):
    """Base of these wrappers; a subclass implements `chosen`."""

    adds = ("positions",)
    fractional = False

    def adopt(self, inners: Sequence[Encoding]) -> None:
        super().adopt(inners)
        wrong = "chooses positions itself" if "positions" in inners[0].hooks else ""
        if wrong or (self.fractional and self.whole_positions):
            wrong = wrong or "refuses fractional positions"
            raise UserError(f"encoding.inner is '{inners[0].name}', which {wrong}: expected another, such as rope")

    def positions(self, ids: Tensor, generator: torch.Generator | None) -> Tensor:
        check_length(self, ids.shape[-1])
        generator = generator or torch.Generator(ids.device).manual_seed(0)
        return self.chosen(torch.arange(ids.shape[-1], device=ids.device)[None], generator)

    def chosen(self, places: Tensor, generator: torch.Generator) -> Tensor:
        """Return the positions of tokens at these places, (1, T)."""
        raise NotImplementedError


class Randomized(Repositioned):
    """Randomized positions around another encoding: short inputs show all the positions and distances of long ones.

        positions = sort(sample of T from {0 .. M-1}),   one draw for the sequences of a batch

    Evaluation draws, too, with its own random stream per window of text. With M = T this is the inner encoding.
    `continuous` draws real numbers from 0 to M, as many as are wanted.

    Source: Ruoss et al. (2023), arXiv:2305.16843, section 3; Shimizu et al. (2026), arXiv:2602.14050 (continuous).
    Beyond training length: defined up to M tokens, `max_length`, all of whose positions training has shown.
    Checked against: the implementations that the inner encoding is checked against, at positions that jump.
    """

    def __init__(
        self, shape: Shape, inner: str = "rope", inner_options: dict[str, Any] = NO_OPTIONS,
        max_length: int | None = None, continuous: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(shape)
        self.fractional = continuous
        self.range = 16 * shape.train_length if max_length is None else max_length
        expected = f"at least train_length, {shape.train_length}, or null for 16 training lengths"
        self.expect(shape.train_length <= self.range, "max_length", max_length, expected)
        # The inner encoding is trained on all these positions.
        self.wrap(inner, inner_options, dataclasses.replace(shape, train_length=self.range))

    def adopt(self, inners: Sequence[Encoding]) -> None:
        super().adopt(inners)
        if not self.fractional:
            self.max_length = self.range if self.max_length is None else min(self.range, self.max_length)
        self.length_dependent = True  # a longer input draws other positions

    def reached(self, inner: Encoding, stretch: Stretch) -> Stretch:
        return dataclasses.replace(stretch, train_length=inner.shape.train_length)  # the range

    def chosen(self, places: Tensor, generator: torch.Generator) -> Tensor:
        if self.fractional:
            return self.range * torch.rand(1, places.shape[1], generator=generator, device=places.device).sort().values
        drawn = torch.randperm(self.range, generator=generator, device=places.device)[: places.shape[1]]
        return drawn.sort().values[None]


class SHAPE(Repositioned):
    """Shifted absolute positions (SHAPE) around another encoding, so that it cannot rely on where a text begins.

        positions = o, o + 1, o + 2 ..   o drawn from 0 .. shift-1 in training,   o = shift in evaluation

    In the authors' code each sequence has a draw of its own.

    Source: Kiyono et al. (2021), arXiv:2109.05644, and the authors' code (butsugiri/shape), whose shift is 500.
    Beyond training length: defined as far as the encoding inside, which is made for train_length + shift positions.
    Checked against: what the encoding inside is checked against.
    """

    def __init__(
        self, shape: Shape, inner: str = "sinusoidal", inner_options: dict[str, Any] = NO_OPTIONS,
        shift: Count = 500,
    ) -> None:  # fmt: skip
        super().__init__(shape)
        self.shift = shift
        self.wrap(inner, inner_options, dataclasses.replace(shape, train_length=shape.train_length + shift))

    def adopt(self, inners: Sequence[Encoding]) -> None:
        super().adopt(inners)
        if self.max_length is not None:
            self.max_length -= self.shift

    def reached(self, inner: Encoding, stretch: Stretch) -> Stretch:
        if "embed" not in inner.hooks:  # distances stay those of the input
            return stretch
        return Stretch(stretch.train_length + self.shift, stretch.length + self.shift)

    def chosen(self, places: Tensor, generator: torch.Generator) -> Tensor:
        if not self.training:
            return places + self.shift
        return places + torch.randint(self.shift, (1, 1), generator=generator, device=places.device)


class CAPE(Repositioned):
    """Continuous augmented positions (CAPE) around another encoding, which then relies on neither place nor scale.

        positions_i = (i + D + e_i)·exp(l) in training,   positions_i = i in evaluation
        D from -global_shift .. global_shift,   e_i from -local_shift .. local_shift,   l from ±ln(scaling), all uniform

    A key that seems ahead of its query is at distance 0. In the authors' code each sequence has draws of its own.

    Source: Likhomanenko et al. (2021), arXiv:2106.03143; defaults are those of gcambara/cape for text.
    Beyond training length: defined as far as the encoding inside, which saw positions up to (T + both shifts)·scaling.
    Checked against: plain loops of sinusoids and of ALiBi, at positions that need not be whole.
    """

    fractional = True

    def __init__(
        self, shape: Shape, inner: str = "sinusoidal", inner_options: dict[str, Any] = NO_OPTIONS,
        global_shift: NonNegative = 5.0, local_shift: NonNegative = 0.5, scaling: AtLeast1 = 1.03,
    ) -> None:  # fmt: skip
        super().__init__(shape)
        self.global_shift, self.local_shift, self.scaling = global_shift, local_shift, scaling
        self.wrap(inner, inner_options)

    def chosen(self, places: Tensor, generator: torch.Generator) -> Tensor:
        if not self.training:
            return places

        def drawn(most: float, count: int) -> Tensor:
            return most * (2 * torch.rand(1, count, generator=generator, device=places.device) - 1)

        moved = places + drawn(self.global_shift, 1)
        stretch = drawn(math.log(self.scaling), 1).exp()
        return (moved + drawn(self.local_shift, places.shape[1])) * stretch
