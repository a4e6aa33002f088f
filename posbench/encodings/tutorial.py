"""The steps by which tutorials lead to sinusoidal positions: the index, its share of the length, its digits, sines."""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings import rope as rotary
from posbench.encodings.absolute import Additive, Combine, Scale, check_whole
from posbench.encodings.base import Shape
from posbench.errors import Undefined
from posbench.options import Above1

Direction = Literal["first", "ones", "random", "learned"]


class Index(Additive):
    """The raw index: the simplest position code.

    The position, as a number, is added along a direction u of the embedding or gets a channel of its own:

        add:     x'_i = x_i + s·i·u
        concat:  x'_i = [x_i ; s·i],  the token table one channel narrower

    u is the first channel, all channels (`ones`, which a LayerNorm before attention removes again), a fixed random unit
    vector (`random`), or learned from such a start. The number outgrows the embeddings in long texts.

    Source: the common first attempt of tutorials on positional encoding; no paper.
    Beyond training length: defined everywhere; values larger than any seen in training.
    Checked against: a plain loop.
    """

    def __init__(
        self, shape: Shape, direction: Direction = "first", combine: Combine = "add", scale: Scale = "token"
    ) -> None:
        super().__init__(shape, combine, scale)
        if combine == "concat":
            self.width = 1
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
    """The index scaled to 0 .. 1 (min-max normalisation).

    The usual fix for an index that grows without bound, with u as in `index`:

        p_i = (i - min) / (max - min) = i / (T - 1),        x'_i = x_i + s·p_i·u    or    [x_i ; s·p_i]

    Values stay small, but p_10 is 10/31 = 0.3226 among 32 tokens and 10/63 = 0.1587 among 64. So the code tells every
    token how long the text is, which leaks the future. `norm: length` divides by the training length instead.

    Source: the common second attempt of tutorials on positional encoding; no paper.
    Beyond training length: defined everywhere; with `batch`, codes of all positions move closer together than trained.
    Checked against: a plain loop.
    """

    def __init__(
        self,
        shape: Shape,
        norm: Literal["batch", "length"] = "batch",
        direction: Direction = "first",
        combine: Combine = "add",
        scale: Scale = "token",
    ) -> None:
        super().__init__(shape, direction, combine, scale)
        self.norm = norm
        self.length_dependent = norm == "batch"

    def code(self, positions: Tensor) -> Tensor:
        if self.norm == "length":
            return super().code(positions / max(1, self.shape.train_length - 1))
        low, high = torch.aminmax(positions.float(), dim=-1, keepdim=True)
        return super().code((positions - low) / torch.where(high > low, high - low, 1))  # a single token is at 0


class Binary(Additive):
    """Binary digits of the index.

    Digits count far with small numbers. Digit k changes every 2^k positions:

        b_ik = floor(i / 2^k) mod 2,  k = 0 .. digits - 1,        x'_i = x_i + s·[b_i ; 0 ... 0]    or    [x_i ; s·b_i]

    Codes are bounded and distinct, but neighbours are not equally far apart, and there is none between two integers.

    Source: the positional numeral system, as tutorials lead to sinusoids by it; no paper.
    Beyond training length: undefined from 2^digits on; by default digits = ceil(log2(train_length)), so soon. Positions
    without digits are refused on a CPU; an accelerator or compiled code does not stop to look at them, and gives NaN.
    Checked against: Python's own binary formatting, in a plain loop.
    """

    whole_positions = True

    def __init__(
        self, shape: Shape, digits: int | None = None, combine: Combine = "add", scale: Scale = "token"
    ) -> None:
        super().__init__(shape, combine, scale)
        self.digits = max(1, (shape.train_length - 1).bit_length()) if digits is None else digits
        room = min(62, shape.d_model if combine == "add" else shape.d_model - 1)  # 62: of an int64
        self.expect(1 <= self.digits <= room, "digits", self.digits, f"1 to {room}, at d_model {shape.d_model}")
        self.max_length = 2**self.digits
        if combine == "concat":
            self.width = self.digits

    def code(self, positions: Tensor) -> Tensor:
        check_whole(self, positions)
        within = (positions >= 0) & (positions < 2**self.digits)
        looks = positions.device.type == "cpu" and not torch.compiler.is_compiling()  # others would wait for the values
        if looks and not within.all():
            beyond = f"position {positions[~within].min().item()} is beyond the end of 'binary'"
            raise Undefined(f"{beyond} (defined from 0 to {2**self.digits - 1}); set encoding.digits")
        bits = (positions[..., None] >> torch.arange(self.digits, device=positions.device)) & 1
        return F.pad(torch.where(within[..., None], bits, math.nan), (0, self.width - self.digits))


class Sine(Additive):
    """Sines only: a continuous form of binary digits.

    Each channel is a sine of the position, the first turning fastest, the last hardly at all:

        PE_ij = sin( i / base^(j/d) ),  j = 0 .. d - 1,        x'_i = x_i + s·PE_i    or    [x_i ; s·PE_i]

    The code is bounded, distinct and independent of the length of the text. But sin(n + k) is no linear function of
    sin(n) alone, so that no linear map moves the code by k. `sinusoidal` adds cosines, which repairs that.

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
