"""The steps by which tutorials lead to sinusoidal positions: the index, its share of the length, its digits, sines."""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings import rope as rotary
from posbench.encodings.absolute import Additive, Combine, Scale, check_whole
from posbench.encodings.base import Shape
from posbench.options import Above1

Direction = Literal["first", "ones", "random", "learned"]


class Index(Additive):
    """The raw index: the position as a number, along a direction u of the embedding or in a channel of its own.

        x'_i = x_i + s·i·u    or    [x_i ; s·i],  the token table one channel narrower

    u is the first channel, all channels (`ones`, which a LayerNorm before attention removes again), a fixed random unit
    vector (`random`), or learned from such a start. The number outgrows the embeddings in long texts.

    Source: the common first attempt of tutorials on positional encoding; no paper.
    Beyond training length: defined everywhere; values larger than any seen in training.
    Checked against: a plain loop.
    """

    def __init__(
        self, shape: Shape, direction: Direction = "first", combine: Combine = "add", scale: Scale = "token"
    ) -> None:
        super().__init__(shape, combine, scale, width=1)
        # The same random vector in every run, so that a checkpoint need not hold it.
        random = F.normalize(torch.randn(self.width, generator=torch.Generator().manual_seed(0)), dim=0)
        fixed = {"first": torch.eye(1, self.width)[0], "ones": torch.ones(self.width), "random": random}
        if direction == "learned":
            self.u: Tensor = nn.Parameter(random)
        else:
            self.register_buffer("u", fixed[direction], persistent=False)

    def code(self, positions: Tensor) -> Tensor:
        return positions[..., None] * self.u


class MinMax(Index):
    """The index scaled to 0 .. 1 (min-max normalisation), with u as in `index`.

        p_i = (i - min) / (max - min) = i / (T - 1),        x'_i = x_i + s·p_i·u    or    [x_i ; s·p_i]

    p_10 is 0.3226 among 32 tokens and 0.1587 among 64: the code tells every token how long the text is, which leaks the
    future. `norm: length` divides by the training length instead.

    Source: the common second attempt of tutorials on positional encoding; no paper.
    Beyond training length: defined everywhere; with `batch`, codes of all positions move closer together than trained.
    Checked against: a plain loop.
    """

    def __init__(
        self, shape: Shape, norm: Literal["batch", "length"] = "batch", direction: Direction = "first",
        combine: Combine = "add", scale: Scale = "token",
    ) -> None:  # fmt: skip
        super().__init__(shape, direction, combine, scale)
        self.norm = norm
        self.length_dependent = norm == "batch"

    def code(self, positions: Tensor) -> Tensor:
        if self.norm == "length":
            return super().code(positions / max(1, self.shape.train_length - 1))
        low, high = torch.aminmax(positions.float(), dim=-1, keepdim=True)
        return super().code((positions - low) / torch.where(high > low, high - low, 1))  # a single token is at 0


class Binary(Additive):
    """Binary digits of the index: codes are bounded and distinct, but neighbours are not equally far apart.

        b_ik = floor(i / 2^k) mod 2,  k = 0 .. digits - 1,        x'_i = x_i + s·[b_i ; 0 ... 0]    or    [x_i ; s·b_i]

    Source: the positional numeral system, as tutorials lead to sinusoids by it; no paper.
    Beyond training length: undefined from 2^digits on, by default the next power of two. Such positions are refused on
    a CPU; an accelerator or compiled code does not stop to look at them, and gives NaN.
    Checked against: Python's own binary formatting, in a plain loop.
    """

    whole_positions = True

    def __init__(
        self, shape: Shape, digits: int | None = None, combine: Combine = "add", scale: Scale = "token"
    ) -> None:
        digits = max(1, (shape.train_length - 1).bit_length()) if digits is None else digits
        super().__init__(shape, combine, scale, width=digits)
        room = min(62, shape.d_model if combine == "add" else shape.d_model - 1)  # 62: of an int64
        self.expect(1 <= digits <= room, "digits", digits, f"1 to {room}, at d_model {shape.d_model}")
        self.digits, self.max_length = digits, 2**digits

    def code(self, positions: Tensor) -> Tensor:
        check_whole(self, positions)
        bits = (positions[..., None] >> torch.arange(self.digits, device=positions.device)) & 1
        within = (positions >= 0) & (positions < 2**self.digits)
        return F.pad(torch.where(within[..., None], bits, math.nan), (0, self.width - self.digits))


class Sine(Additive):
    """Sines only: a continuous form of binary digits, the first channel turning fastest, the last hardly at all.

        PE_ij = sin( i / base^(j/d) ),  j = 0 .. d - 1,        x'_i = x_i + s·PE_i    or    [x_i ; s·PE_i]

    sin(n + k) is no linear function of sin(n) alone: no linear map moves the code by k, as in `sinusoidal`.

    Source: the step before Vaswani et al. (2017), arXiv:1706.03762, as tutorials lead to it; no paper of its own.
    Beyond training length: defined everywhere; slow channels reach values unseen in training.
    Checked against: math.sin in a plain loop.
    """

    def __init__(self, shape: Shape, base: Above1 = 10000.0, combine: Combine = "add", scale: Scale = "token") -> None:
        super().__init__(shape, combine, scale)
        self.base = base

    def code(self, positions: Tensor) -> Tensor:
        frequencies = rotary.frequencies(2 * self.width, self.base)  # width of them: base^(-j/width)
        return rotary.angles(positions, frequencies).sin().float().to(positions.device)
