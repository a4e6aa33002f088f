"""Bilevel positions (BiPE): places within segments at the input, the numbers of the segments in another encoding.

Segments are sentences and lines. A separator, a full stop or a newline, belongs to the segment that it closes:

    tokens       a b . c d . e
    segments s   0 0 0 1 1 1 2     what the encoding inside, a relative one, is given as positions
    places p     0 1 2 0 1 2 0     x'_i = x_i + E[p_i],   E of size train_length x d_model, its last row for all beyond

A token is a separator if its text, without spaces around it, is in `separators`. Without any, all is one segment.

Source: He et al. (2024), arXiv:2401.16421, and the authors' code, where ALiBi's slopes are multiplied by 96 here.
Beyond training length: defined as far as the encoding inside; more segments are unseen, not longer ones.
Checked against: plain loops of segments, places and ALiBi; what the encoding inside is checked against.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings.base import Shape, check_length
from posbench.encodings.distance import default_slopes
from posbench.encodings.positions import places
from posbench.encodings.wrapper import NO_OPTIONS, Wrapper
from posbench.errors import UserError
from posbench.options import Positive

SEPARATORS = [".", "\n"]


class BiPE(Wrapper):
    adds = ("positions", "embed")
    separators: Tensor

    def __init__(
        self, shape: Shape, inner: str = "rope", inner_options: dict[str, Any] = NO_OPTIONS,
        separators: list[str] = SEPARATORS, alibi_factor: Positive = 96.0,
    ) -> None:  # fmt: skip
        super().__init__(shape)
        if inner == "alibi" and inner_options.get("slopes") is None:
            slopes = [alibi_factor * slope for slope in default_slopes(shape.n_heads)]
            inner_options = {**inner_options, "slopes": slopes}
        ends = [*(text.strip(" ") in separators for text in shape.vocabulary), False]  # the last is an unknown token
        self.register_buffer("separators", torch.tensor(ends), persistent=False)
        self.table = nn.Parameter(torch.randn(shape.train_length, shape.d_model) * shape.token_rms)
        self.wrap(inner, inner_options)
        if self.inner_encodings[0].hooks & {"positions", "token_dim", "embed"}:
            raise UserError(f"encoding.inner is '{inner}': expected a relative encoding, such as rope or alibi")

    def positions(self, ids: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return the number of each token's segment."""
        check_length(self, ids.shape[-1])
        return F.pad(self.separators[ids.clamp(max=len(self.separators) - 1)], (1, -1)).cumsum(-1)

    def embed(self, x: Tensor, positions: Tensor, ids: Tensor | None = None) -> Tensor:
        segments = positions.new_zeros(x.shape[:2]) if ids is None else self.positions(ids, None)
        place = places(segments).clamp(max=len(self.table) - 1)
        return (x + F.embedding(place, self.table)).to(x.dtype)
