"""The raw index: the simplest position code.

The position, as a number, is added along a direction u of the embedding or gets a channel of its own:

    add:     x'_i = x_i + s·i·u
    concat:  x'_i = [x_i ; s·i],  the token table one channel narrower

u is the first channel, all channels (`ones`), a fixed random unit vector (`random`), or learned from such a start. The
default is `first`, since with `ones` a LayerNorm before attention removes the index again. Positions are distinct and
their distances well defined, but the number outgrows the embeddings in long texts.

Source: the common first attempt of tutorials on positional encoding; no paper.
Beyond training length: defined everywhere; values larger than any seen in training.
Checked against: a plain loop.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings._additive import Additive
from posbench.encodings.base import Shape

Direction = Literal["first", "ones", "random", "learned"]


class Index(Additive):
    def __init__(
        self,
        shape: Shape,
        direction: Direction = "first",
        combine: Literal["add", "concat"] = "add",
        scale: Literal["token"] | float = "token",
    ) -> None:
        super().__init__(shape, combine, scale)
        if combine == "concat":
            self.width = 1
        u = _vector(direction, self.width)
        if direction == "learned":
            self.u: Tensor = nn.Parameter(u)
        else:
            self.register_buffer("u", u, persistent=False)

    def code(self, positions: Tensor) -> Tensor:
        return positions.float()[..., None] * self.u.float()


def _vector(direction: Direction, width: int) -> Tensor:
    if direction == "first":
        return torch.eye(1, width)[0]
    if direction == "ones":
        return torch.ones(width)
    # The same vector in every run, so that a checkpoint need not hold it.
    u = torch.randn(width, generator=torch.Generator().manual_seed(0))
    return F.normalize(u, dim=0)
