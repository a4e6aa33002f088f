"""Continuous augmented positions (CAPE) around another encoding, which then relies on neither place nor scale.

In training, one random number shifts all positions, another shifts each single one, and a third stretches all. In
evaluation, positions are unchanged:

    positions_i = (i + D + e_i)·exp(l) in training,   positions_i = i in evaluation
    D from -global_shift .. global_shift,   e_i from -local_shift .. local_shift,   l from ±ln(scaling), all uniform

With a local_shift above 0.5 neighbours may swap places. A bias by distance then treats a key that seems ahead of its
query as at distance 0. With both shifts 0 and a scaling of 1 this is the inner encoding. All sequences of a batch share
the draws here, as in `randomized`; in the authors' code each has its own. Their option for speech to subtract the mean
is left out: it tells every token how long the text is. The inner encoding sets the scale of its code.

Source: Likhomanenko et al., "CAPE: Encoding Relative Positions with Continuous Augmented Positional Embeddings" (2021),
arXiv:2106.03143, by the code of gcambara/cape that follows it, whose values for text are the defaults. An early version
of that code halves the local shift.
Beyond training length: defined as far as the encoding inside, which has seen positions up to (T + both shifts)·scaling.
Checked against: plain loops of sinusoids and of ALiBi, at positions that need not be whole.
"""

import math
from typing import Any

import torch
from torch import Tensor

from posbench.encodings._wrapper import NO_OPTIONS, Repositioned, build_inner
from posbench.encodings.base import Shape, check_length
from posbench.errors import UserError


class CAPE(Repositioned):
    def __init__(
        self,
        shape: Shape,
        inner: str = "sinusoidal",
        inner_options: dict[str, Any] = NO_OPTIONS,
        global_shift: float = 5.0,
        local_shift: float = 0.5,
        scaling: float = 1.03,
    ) -> None:
        super().__init__(shape)
        for option, shift in (("global_shift", global_shift), ("local_shift", local_shift)):
            self.expect(0 <= shift < math.inf, option, shift, "a number of tokens of at least 0")
        self.expect(1 <= scaling < math.inf, "scaling", scaling, "a number of at least 1")
        self.global_shift, self.local_shift, self.scaling = global_shift, local_shift, scaling
        self.adopt([build_inner(inner, shape, inner_options, "encoding.inner_options")])
        if self.whole_positions:
            raise UserError(
                f"encoding.inner is '{inner}', which refuses fractional positions: expected one that takes "
                "them, such as sinusoidal"
            )

    def positions(self, ids: Tensor, generator: torch.Generator | None) -> Tensor:
        check_length(self, ids.shape[-1])
        places = torch.arange(ids.shape[-1], device=ids.device)[None]
        if not self.training:
            return places
        stream = self.stream(ids, generator)

        def drawn(most: float, count: int) -> Tensor:
            return most * (2 * torch.rand(1, count, generator=stream, device=ids.device) - 1)

        moved = places + drawn(self.global_shift, 1)
        stretch = drawn(math.log(self.scaling), 1).exp()
        return (moved + drawn(self.local_shift, ids.shape[-1])) * stretch
