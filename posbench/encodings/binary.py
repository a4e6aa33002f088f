"""Binary digits of the index.

Digits count far with small numbers. Digit k changes every 2^k positions:

    b_ik = floor(i / 2^k) mod 2,  k = 0 .. digits - 1,        x'_i = x_i + s·[b_i ; 0 ... 0]    or    [x_i ; s·b_i]

With three digits, least significant first: 000 100 010 110 001 101 011 111. Every position has its own code, and all
codes are bounded. But neighbours are not equally far apart (1 to 2 flips two digits, 2 to 3 one), and there is no code
between two integers. The sine encodings make such digits continuous.

Source: the positional numeral system, as tutorials lead to sinusoids by it; no paper.
Beyond training length: undefined from 2^digits on; by default digits = ceil(log2(train_length)), so soon. Positions
that have no digits are refused on a CPU; an accelerator or compiled code does not stop to look at them, and gives NaN.
Checked against: Python's own binary formatting, in a plain loop.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from posbench.encodings._additive import Additive
from posbench.encodings.base import Shape, check_length
from posbench.errors import Undefined, UserError


class Binary(Additive):
    whole_positions = True

    def __init__(
        self,
        shape: Shape,
        digits: int | None = None,
        combine: Literal["add", "concat"] = "add",
        scale: Literal["token"] | float = "token",
    ) -> None:
        super().__init__(shape, combine, scale)
        self.digits = max(1, (shape.train_length - 1).bit_length()) if digits is None else digits
        room = min(62, shape.d_model if combine == "add" else shape.d_model - 1)  # 62: of an int64
        self.expect(1 <= self.digits <= room, "digits", self.digits, f"1 to {room}, at d_model {shape.d_model}")
        self.max_length = 2**self.digits
        if combine == "concat":
            self.width = self.digits

    def code(self, positions: Tensor) -> Tensor:
        check_length(self, positions.shape[-1])
        digit = torch.arange(self.digits, device=positions.device)
        bits = ((positions.long()[..., None] >> digit) & 1).float()
        defined = self._defined(positions)[..., None]
        return F.pad(torch.where(defined, bits, math.nan), (0, self.width - self.digits))

    def _defined(self, positions: Tensor) -> Tensor:
        """Whether each position has a code."""
        defined: Tensor = (positions >= 0) & (positions < 2**self.digits)
        whole: Tensor = positions == positions.floor() if positions.is_floating_point() else defined
        waits = positions.device.type != "cpu" or torch.compiler.is_compiling()  # the host, for the values
        if not waits and not defined.all():
            beyond = positions[~defined].min().item()
            raise Undefined(
                f"position {beyond:g} is beyond the end of 'binary' "
                f"({self.digits} digits count from 0 to {2**self.digits - 1}); set encoding.digits"
            )
        if not waits and not whole.all():
            raise UserError("'binary' has digits for whole positions only: choose 'sine' for positions in between")
        return defined.logical_and(whole)
