"""Learned positions from the texts of tokens, at the input, for problems with numbers; beside another encoding."""

from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings.base import Encoding, Shape
from posbench.encodings.wrapper import NO_OPTIONS, Wrapper
from posbench.options import Offset
from posbench.randomness import generator
from posbench.tasks.base import ANSWER, SEPARATOR


class Abacus(Wrapper):
    """Abacus embeddings: where a digit stands within its number, at the input, beside another encoding.

        tokens     1 2 + 3 4 5 =
        places p   1 2 0 1 2 3 0     x'_i = x_i + E[p_i + o] for digits,   x'_i = x_i + E[0] for all other tokens

    E is learned; o is drawn from 0 .. max_offset for every update, so that the rows of longer numbers are trained too,
    and is 0 in evaluation. A digit is a token whose whole text is a digit. The authors write numbers with the least
    significant digit first, so that a place is a power of ten; here the order of the text is kept.

    Source: McLeish et al., "Transformers Can Do Arithmetic with the Right Embeddings" (2024), arXiv:2405.17399, and the
    authors' code (mcleish7/arithmetic), which has no last row for the digits beyond it, and whose table starts as
    torch's embeddings do; here at the spread of the token embeddings, and E[0] at 0 (drawn, too, with `others: random`,
    which gives nearly every token of a text the same large vector).
    Beyond training length: defined as far as the encoding inside; numbers that are up to max_offset digits longer than
    trained ones have rows that were trained.
    Checked against: plain loops; what the encoding inside is checked against.
    """

    adds = ("embed",)
    digits: Tensor
    offset: Tensor

    def __init__(
        self,
        shape: Shape,
        inner: str = "none",
        inner_options: dict[str, Any] = NO_OPTIONS,
        rows: int = 1024,
        max_offset: Offset = 99,
        others: Literal["zero", "random"] = "zero",
    ) -> None:
        super().__init__(shape)
        self.expect(rows >= max_offset + 2, "rows", rows, f"at least max_offset + 2, {max_offset + 2}")
        self.max_offset = max_offset
        self.seed = int(torch.randint(2**31, (), device="cpu"))  # of the offsets
        self.table = nn.Parameter(torch.randn(rows, shape.d_model) * shape.token_rms)
        if others == "zero":
            with torch.no_grad():
                self.table[0] = 0
        self.register_buffer("digits", ids_of("0123456789", shape.vocabulary), persistent=False)
        self.register_buffer("offset", torch.zeros((), dtype=torch.long), persistent=False)
        self.wrap(inner, inner_options)

    def remarks(self) -> list[str]:
        missing = "a digit by itself: all tokens get the same vector"
        return [*remarks_without(self, self.digits, missing), *super().remarks()]

    def set_progress(self, done: float) -> None:
        drawn = torch.randint(self.max_offset + 1, (), generator=generator(self.seed, "abacus", repr(done)))
        self.offset.fill_(int(drawn))

    def embed(self, x: Tensor, positions: Tensor, ids: Tensor | None = None) -> Tensor:
        x = super().embed(x, positions, ids)
        place = positions.new_zeros(x.shape[:2], dtype=torch.long) if ids is None else self.places(ids)
        return (x + F.embedding(place, self.table)).to(x.dtype)

    def places(self, ids: Tensor) -> Tensor:
        """Return the row of the table for each token id (B, T)."""
        digit = among(ids, self.digits)
        begins = digit & ~F.pad(digit, (1, -1))
        place = 1 + places(begins.cumsum(-1))
        if self.training:
            place = place + self.offset
        return torch.where(digit, place.clamp(max=len(self.table) - 1), 0)


class PositionCoupling(Wrapper):
    """Position coupling: tokens of equal meaning share a learned position, such as digits of equal significance.

    For problems whose numbers or strings have equal lengths, and whose answer takes them up again:

        tokens       $ 6 5 3 + 0 4 9 = 2 0 7 0 $       653 + 049, the answer from its last digit on
        positions p  0 2 3 4 5 2 3 4 5 4 3 2 1 0       x'_i = x_i + E[p_i + o],   x'_i = x_i + E[0] for separators

    The numbers of a question count upwards from 2, with the `+` behind them. `=` belongs to the answer. A `reversed`
    answer counts down from where the last number ended. A `plain` one counts upwards from 1, and numbers begin at
    2 + `longer`, the tokens that it has more than a number: 1 in addition, 0 where a string is copied. So a position
    depends on earlier tokens only. In text without such marks everything between two separators is one number.

    o moves the positions of a problem, so that all rows of E are trained. In training it is drawn for every update, at
    most to where the problem's largest position has the last row, `max_position`; in evaluation it is 0. Positions
    beyond the rows share the last one; an answer that is too long stays at 1.

    Source: Cho et al., "Position Coupling: Improving Length Generalization of Arithmetic Transformers Using Task
    Structure" (2024), arXiv:2405.20671, section 3, and the authors' code (HanseulJo/position-coupling), for addition
    and copies; without their couplings of products and mazes. There each problem draws its own o. The table starts at
    the spread of the token embeddings.
    Beyond training length: defined as far as the encoding inside; rows up to `max_position` were trained.
    Checked against: plain loops over the tokens; what the encoding inside is checked against; by hand, also the
    authors' code.
    """

    name = "coupling"
    adds = ("embed",)
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
        longer: Offset = 1,
        max_position: int | None = None,
    ) -> None:
        super().__init__(shape)
        self.max_position = 2 * shape.train_length if max_position is None else max_position
        self.begin = 2 if answer == "reversed" else 2 + longer  # the position where a number begins
        expected = f"at least {self.begin}, or null for 2 training lengths"
        self.expect(self.max_position >= self.begin, "max_position", max_position, expected)
        self.reversed = answer == "reversed"
        self.seed = int(torch.randint(2**31, (), device="cpu"))  # of the shifts
        self.table = nn.Parameter(torch.randn(self.max_position + 1, shape.d_model) * shape.token_rms)
        for name, text in {"joins": "+", "answers": ANSWER, "separators": SEPARATOR}.items():
            self.register_buffer(name, ids_of([text], shape.vocabulary), persistent=False)
        self.register_buffer("share", torch.zeros(()), persistent=False)  # of the largest possible shift
        self.wrap(inner, inner_options)

    def remarks(self) -> list[str]:
        missing = f"'{ANSWER}' by itself: no answer is coupled to its question"
        return [*remarks_without(self, self.answers, missing), *super().remarks()]

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
        """Return the position of each token id (B, T), not shifted; 0 for separators."""
        answer, separator = among(ids, self.answers), among(ids, self.separators)
        closes = separator | among(ids, self.joins)
        within = places((answer | F.pad(closes, (1, -1))).cumsum(-1))  # its part of the problem, from 0
        first = torch.arange(ids.shape[-1], device=ids.device) - within
        before = F.pad((within + 1).masked_fill(closes, 0), (1, -1)).gather(-1, first)  # size of the part before
        counted = (before + 2 - within).clamp(min=1) if self.reversed else within + 1
        return torch.where(answer.gather(-1, first), counted, self.begin + within).masked_fill(separator, 0)


def ids_of(texts: Iterable[str], vocabulary: tuple[str, ...]) -> Tensor:
    """Return the ids (N,) of the tokens with one of these texts; none without a vocabulary."""
    wanted = set(texts)
    return torch.tensor([i for i, text in enumerate(vocabulary) if text in wanted], dtype=torch.long)


def among(ids: Tensor, chosen: Tensor) -> Tensor:
    """Return whether each token id (B, T) is among the chosen (N,): (B, T) bool."""
    return (ids[..., None] == chosen).any(-1)  # torch.isin may make the host wait for its device


def places(numbers: Tensor) -> Tensor:
    """Return the count of earlier tokens with the same number: (B, T), of numbers that never fall within a row."""
    first = torch.searchsorted(numbers, numbers)
    return torch.arange(numbers.shape[-1], device=numbers.device) - first


def remarks_without(encoding: Encoding, ids: Tensor, missing: str) -> list[str]:
    """Return a remark if the vocabulary is known and has none of the tokens that an encoding looks for."""
    absent = encoding.shape.vocabulary and not len(ids)
    return [f"{encoding.name}: no token of the vocabulary is {missing}"] if absent else []
