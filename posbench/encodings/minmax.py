"""The index scaled to 0 .. 1 (min-max normalisation).

The usual fix for an index that grows without bound:

    p_i = (i - min) / (max - min) = i / (T - 1),        x'_i = x_i + s·p_i·u    or    [x_i ; s·p_i]

with u as in `index`. Values stay small, but the code of a position depends on the length of the text: p_10 is 10/31 =
0.3226 among 32 tokens and 10/63 = 0.1587 among 64. It also tells every token how long the text is, which leaks the
future in a causal model. `norm: length` divides by the training length instead: the plain index on another scale, the
same in every text.

Source: the common second attempt of tutorials on positional encoding; no paper.
Beyond training length: defined everywhere; with `batch`, codes of all positions move closer together than trained.
Checked against: a plain loop.
"""

from typing import Literal

import torch
from torch import Tensor

from posbench.encodings.base import Shape
from posbench.encodings.index import Direction, Index


class MinMax(Index):
    length_dependent = True

    def __init__(
        self,
        shape: Shape,
        norm: Literal["batch", "length"] = "batch",
        direction: Direction = "first",
        combine: Literal["add", "concat"] = "add",
        scale: Literal["token"] | float = "token",
    ) -> None:
        super().__init__(shape, direction, combine, scale)
        self.norm = norm
        self.length_dependent = norm == "batch"

    def code(self, positions: Tensor) -> Tensor:
        if self.norm == "length":
            return super().code(positions.float() / max(1, self.shape.train_length - 1))
        low, high = torch.aminmax(positions.float(), dim=-1, keepdim=True)
        span = high - low
        return super().code((positions - low) / torch.where(span > 0, span, 1))  # a single token is at 0
