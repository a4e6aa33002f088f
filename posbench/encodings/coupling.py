"""Position coupling: tokens of equal meaning share a learned position, such as digits of equal significance.

For problems whose numbers or strings have equal lengths, and whose answer takes them up again:

    tokens       $ 6 5 3 + 0 4 9 = 2 0 7 0 $       653 + 049, the answer from its last digit on
    positions p  0 2 3 4 5 2 3 4 5 4 3 2 1 0       x'_i = x_i + E[p_i + o],   x'_i = x_i + E[0] for separators

The numbers of a question count upwards from 2, with the `+` behind them. `=` belongs to the answer. A `reversed` answer
counts down from where the last number ended. A `plain` one counts upwards from 1, and numbers begin at 2 + `longer`,
the tokens that it has more than a number: 1 in addition, 0 where a string is copied. So a position depends on earlier
tokens only. Tokens are known by their whole texts.

o moves the positions of a problem, so that all rows of E are trained. In training it is drawn for every update, at most
to where the problem's largest position has the last row, `max_position`. In evaluation it is 0. Positions beyond the
rows share the last one; an answer that is too long stays at 1.

In text without such marks everything between two separators is one number: learned positions that begin anywhere.

Source: Cho et al., "Position Coupling: Improving Length Generalization of Arithmetic Transformers Using Task Structure"
(2024), arXiv:2405.20671, section 3, and the authors' code (HanseulJo/position-coupling), for addition and copies;
without their couplings of products and mazes. The last version of the code has addition's positions mirrored. There
each problem draws its own o. The table starts at the spread of the token embeddings.
Beyond training length: defined as far as the encoding inside; rows up to `max_position` were trained.
Checked against: plain loops over the tokens; what the encoding inside is checked against; by hand, also the authors'
code.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings import _texts as texts
from posbench.encodings._wrapper import NO_OPTIONS, Wrapper, build_inner
from posbench.encodings.base import Shape
from posbench.randomness import generator
from posbench.tasks.base import ANSWER, SEPARATOR

JOIN = "+"  # between the numbers of a question


class PositionCoupling(Wrapper):
    name = "coupling"
    joins: Tensor
    answers: Tensor
    separators: Tensor
    share: Tensor

    def __init__(
        self,
        shape: Shape,
        inner: str = "none",
        inner_options: dict[str, Any] = NO_OPTIONS,
        answer: Literal["reversed", "plain"] = "reversed",
        longer: int = 1,
        max_position: int | None = None,
    ) -> None:
        super().__init__(shape)
        self.expect(longer >= 0, "longer", longer, "a number of tokens of at least 0")
        self.max_position = 2 * shape.train_length if max_position is None else max_position
        self.begin = 2 if answer == "reversed" else 2 + longer  # the position where a number begins
        expected = f"at least {self.begin}, or null for 2 training lengths"
        self.expect(self.max_position >= self.begin, "max_position", max_position, expected)
        self.reversed = answer == "reversed"
        self.seed = int(torch.randint(2**31, (), device="cpu"))  # of the shifts
        self.table = nn.Parameter(torch.randn(self.max_position + 1, shape.d_model) * shape.token_rms)
        for name, text in {"joins": JOIN, "answers": ANSWER, "separators": SEPARATOR}.items():
            self.register_buffer(name, texts.ids_of([text], shape.vocabulary), persistent=False)
        self.register_buffer("share", torch.zeros(()), persistent=False)  # of the largest possible shift
        self.adopt([build_inner(inner, shape, inner_options, "encoding.inner_options")])

    @property
    def hooks(self) -> frozenset[str]:
        return super().hooks | {"embed"}

    def remarks(self) -> list[str]:
        said = f"'{ANSWER}' by itself: no answer is coupled to its question"
        return [*texts.remarks_without(self, self.answers, said), *super().remarks()]

    def set_progress(self, done: float) -> None:
        self.share.fill_(float(torch.rand((), generator=generator(self.seed, "position coupling", repr(done)))))

    def embed(self, x: Tensor, positions: Tensor, ids: Tensor | None = None) -> Tensor:
        x = super().embed(x, positions, ids)
        if ids is None:
            place = self.begin + torch.arange(x.shape[1], device=x.device).expand(len(x), -1)
        else:
            place = self.places(ids)
        if self.training:
            room = (self.max_position - place.amax(-1, keepdim=True)).clamp(min=0)
            shift = (self.share * (room + 1)).long().minimum(room)
            place = torch.where(place > 0, place + shift, 0)
        return (x + F.embedding(place.clamp(max=self.max_position), self.table)).to(x.dtype)

    def places(self, ids: Tensor) -> Tensor:
        """The position of each token id (B, T), not shifted; 0 for separators."""
        answer, separator = texts.among(ids, self.answers), texts.among(ids, self.separators)
        closes = separator | texts.among(ids, self.joins)
        within = texts.places((answer | F.pad(closes, (1, -1))).cumsum(-1))  # its part of the problem, from 0
        first = torch.arange(ids.shape[-1], device=ids.device) - within
        before = F.pad((within + 1).masked_fill(closes, 0), (1, -1)).gather(-1, first)  # size of the part before
        counted = (before + 2 - within).clamp(min=1) if self.reversed else within + 1
        return torch.where(answer.gather(-1, first), counted, self.begin + within).masked_fill(separator, 0)
