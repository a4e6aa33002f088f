"""Abacus embeddings: where a digit stands within its number, at the input, beside another encoding.

    tokens     1 2 + 3 4 5 =
    places p   1 2 0 1 2 3 0     x'_i = x_i + E[p_i + o] for digits,   x'_i = x_i + E[0] for all other tokens

E is learned; o is drawn from 0 .. max_offset for every update, so that the rows of longer numbers are trained as well,
and is 0 in evaluation. A digit is a token whose whole text is a digit. The authors read single characters and write
numbers with the least significant digit first, so that a place is a power of ten. Here the order of the text is kept.

Source: McLeish et al., "Transformers Can Do Arithmetic with the Right Embeddings" (2024), arXiv:2405.17399, and the
authors' code (mcleish7/arithmetic), which has no last row for the digits beyond it. There the table starts as torch's
embeddings do; here at the spread of the token embeddings, and E[0] at 0. With `others: random` E[0] is drawn, too, as
the authors' is. In text nearly every token then gets the same large vector, which a short training must unlearn.
Beyond training length: defined as far as the encoding inside; numbers that are up to max_offset digits longer than
trained ones have rows that were trained.
Checked against: plain loops; what the encoding inside is checked against.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings import _texts as texts
from posbench.encodings._wrapper import NO_OPTIONS, Wrapper, build_inner
from posbench.encodings.base import Shape
from posbench.randomness import generator


class Abacus(Wrapper):
    digits: Tensor
    offset: Tensor

    def __init__(
        self,
        shape: Shape,
        inner: str = "none",
        inner_options: dict[str, Any] = NO_OPTIONS,
        rows: int = 1024,
        max_offset: int = 99,
        others: Literal["zero", "random"] = "zero",
    ) -> None:
        super().__init__(shape)
        self.expect(max_offset >= 0, "max_offset", max_offset, "a number of rows of at least 0")
        self.expect(rows >= max_offset + 2, "rows", rows, f"at least max_offset + 2, {max_offset + 2}")
        self.max_offset = max_offset
        self.seed = int(torch.randint(2**31, (), device="cpu"))  # of the offsets
        self.table = nn.Parameter(torch.randn(rows, shape.d_model) * shape.token_rms)
        if others == "zero":
            with torch.no_grad():
                self.table[0] = 0
        self.register_buffer("digits", texts.ids_of("0123456789", shape.vocabulary), persistent=False)
        self.register_buffer("offset", torch.zeros((), dtype=torch.long), persistent=False)
        self.adopt([build_inner(inner, shape, inner_options, "encoding.inner_options")])

    @property
    def hooks(self) -> frozenset[str]:
        return super().hooks | {"embed"}

    def remarks(self) -> list[str]:
        said = "a digit by itself: all tokens get the same vector"
        return [*texts.remarks_without(self, self.digits, said), *super().remarks()]

    def set_progress(self, done: float) -> None:
        drawn = torch.randint(self.max_offset + 1, (), generator=generator(self.seed, "abacus", repr(done)))
        self.offset.fill_(int(drawn))

    def embed(self, x: Tensor, positions: Tensor, ids: Tensor | None = None) -> Tensor:
        x = super().embed(x, positions, ids)
        place = positions.new_zeros(x.shape[:2], dtype=torch.long) if ids is None else self.places(ids)
        return (x + F.embedding(place, self.table)).to(x.dtype)

    def places(self, ids: Tensor) -> Tensor:
        """The row of the table for each token id (B, T)."""
        digit = texts.among(ids, self.digits)
        begins = digit & ~F.pad(digit, (1, -1))
        place = 1 + texts.places(begins.cumsum(-1))
        if self.training:
            place = place + self.offset
        return torch.where(digit, place.clamp(max=len(self.table) - 1), 0)
