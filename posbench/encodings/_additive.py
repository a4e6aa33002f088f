"""Shared by encodings that add a position code to the token embeddings or concatenate one.

    add:     x'_i = x_i + s·code(i)
    concat:  x'_i = [x_i ; s·code(i)],  the last quarter of the model's width; the token table is narrower by as much

The scale s of the code decides whether words or positions dominate. Vaswani et al. therefore multiply the token
embeddings by sqrt(d_model): these have rms 1 and the sinusoids rms 0.71. `scale: token` keeps that ratio for any
initialisation: s is the initial rms of the token embeddings.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from posbench.encodings.base import Encoding, Shape


class Additive(Encoding):
    """Base of the encodings that add a code at the input; a subclass implements only `code`."""

    def __init__(
        self,
        shape: Shape,
        combine: Literal["add", "concat"] = "add",
        scale: Literal["token"] | float = "token",
    ) -> None:
        super().__init__(shape)
        if scale != "token":
            self.expect(math.isfinite(scale) and scale > 0, "scale", scale, "'token' or a number above 0")
        self.combine = combine
        self.width = shape.d_model if combine == "add" else max(1, shape.d_model // 4)  # of the code
        self.scale = shape.token_rms if scale == "token" else scale

    def code(self, positions: Tensor) -> Tensor:
        """The unscaled code of positions (1|B, T): (1|B, T, width), fp32."""
        raise NotImplementedError

    def token_dim(self) -> int:
        return self.shape.d_model - (self.width if self.combine == "concat" else 0)

    def embed(self, x: Tensor, positions: Tensor, ids: Tensor | None = None) -> Tensor:
        code = self.scale * self.code(positions)
        if self.combine == "add":
            return (x + code).to(x.dtype)
        return torch.cat((x, code.to(x.dtype).expand(len(x), -1, -1)), dim=-1)
