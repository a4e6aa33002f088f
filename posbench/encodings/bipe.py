"""Bilevel positions (BiPE): places within segments at the input, the numbers of the segments in another encoding.

Segments are sentences and lines. A separator, a full stop or a newline, belongs to the segment that it closes:

    tokens       a b . c d . e
    segments s   0 0 0 1 1 1 2     what the encoding inside, a relative one, is given as positions
    places p     0 1 2 0 1 2 0     x'_i = x_i + E[p_i],   E of size train_length x d_model, its last row for all beyond

A token is a separator if its text, without spaces around it, is in `separators`; the authors use the ids of two tokens.
A token that merely contains a separator (" end."), or that is two newlines, closes nothing unless it is listed. Both
numbers count from the model's first token, which may be anywhere in a sentence. Text without separators, or with an
unknown vocabulary, is one segment.

Source: He et al., "Two Stones Hit One Bird: Bilevel Positional Encoding for Better Length Extrapolation" (2024),
arXiv:2401.16421, and the authors' code (zhenyuhe00/BiPE), where ALiBi's slopes are multiplied by 96 here: option
`alibi_factor`. Without their option of a scale of the queries.
Beyond training length: defined as far as the encoding inside; more segments are unseen, not longer ones.
Checked against: plain loops of segments, places and ALiBi; what the encoding inside is checked against.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings import _texts as texts
from posbench.encodings._wrapper import NO_OPTIONS, Wrapper, build_inner
from posbench.encodings.alibi import default_slopes
from posbench.encodings.base import Shape, check_length
from posbench.errors import UserError

SEPARATORS = [".", "\n"]


class BiPE(Wrapper):
    separators: Tensor

    def __init__(
        self,
        shape: Shape,
        inner: str = "rope",
        inner_options: dict[str, Any] = NO_OPTIONS,
        separators: list[str] = SEPARATORS,
        alibi_factor: float = 96.0,
    ) -> None:
        super().__init__(shape)
        named = len(separators) > 0 and all(text and text == text.strip(" ") for text in separators)
        self.expect(named, "separators", separators, "at least one text of a token, without spaces around it")
        self.expect(0 < alibi_factor < math.inf, "alibi_factor", alibi_factor, "a number above 0")
        if inner == "alibi" and inner_options.get("slopes") is None:
            slopes = [alibi_factor * slope for slope in default_slopes(shape.n_heads)]
            inner_options = {**inner_options, "slopes": slopes}
        self.listed = separators
        bare = tuple(text.strip(" ") for text in shape.vocabulary)
        self.register_buffer("separators", texts.ids_of(separators, bare), persistent=False)
        self.table = nn.Parameter(torch.randn(shape.train_length, shape.d_model) * shape.token_rms)
        self.adopt([build_inner(inner, shape, inner_options, "encoding.inner_options")])
        if acts := self.inner_encodings[0].hooks & {"positions", "token_dim", "embed"}:
            does = "chooses positions itself" if "positions" in acts else "acts at the input"
            raise UserError(
                f"encoding.inner is '{inner}', which {does}: expected a relative one, such as rope or alibi"
            )

    @property
    def hooks(self) -> frozenset[str]:
        return super().hooks | {"positions", "embed"}

    def remarks(self) -> list[str]:
        said = f"one of {self.listed} by itself: all text is one segment"
        return [*texts.remarks_without(self, self.separators, said), *super().remarks()]

    def positions(self, ids: Tensor, generator: torch.Generator | None) -> Tensor:
        """The number of each token's segment."""
        check_length(self, ids.shape[-1])
        closes = texts.among(ids, self.separators)
        return F.pad(closes, (1, -1)).cumsum(-1)

    def embed(self, x: Tensor, positions: Tensor, ids: Tensor | None = None) -> Tensor:
        segments = positions.new_zeros(x.shape[:2]) if ids is None else self.positions(ids, None)
        place = texts.places(segments).clamp(max=len(self.table) - 1)
        return (x + F.embedding(place, self.table)).to(x.dtype)
