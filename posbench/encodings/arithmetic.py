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


class Textual(Wrapper):
    """Base of these encodings: adds a row of a learned table to each token; a subclass implements `places`."""

    adds = ("embed",)
    sought: tuple[Iterable[str], ...]  # texts of tokens by their kind, from 1
    missing: str  # the first of them, and what its lack means
    kinds: Tensor
    drawn: Tensor

    def __init__(self, shape: Shape, rows: int, inner: str, inner_options: dict[str, Any]) -> None:
        super().__init__(shape)
        self.seed = int(torch.randint(2**31, (), device="cpu"))  # of what is drawn for every update
        self.table = nn.Parameter(torch.randn(rows, shape.d_model) * shape.token_rms)
        kinds = [sum(kind * (text in texts) for kind, texts in enumerate(self.sought, 1)) for text in shape.vocabulary]
        self.register_buffer("kinds", torch.tensor([*kinds, 0]), persistent=False)  # the last is that of unknown tokens
        self.register_buffer("drawn", torch.zeros(()), persistent=False)
        self.wrap(inner, inner_options)

    def embed(self, x: Tensor, positions: Tensor, ids: Tensor | None = None) -> Tensor:
        x = super().embed(x, positions, ids)
        last = len(self.kinds) - 1
        kinds = self.kinds[self.kinds.new_full(x.shape[:2], last) if ids is None else ids.clamp(max=last)]
        return (x + F.embedding(self.places(kinds), self.table)).to(x.dtype)

    def places(self, kinds: Tensor) -> Tensor:
        """Return the row of the table for each token, of these kinds (B, T)."""
        raise NotImplementedError

    def remarks(self) -> list[str]:
        return [*remarks_without(self, self.kinds.eq(1).nonzero(), self.missing), *super().remarks()]


class Abacus(Textual):
    """Abacus embeddings: where a digit stands within its number, at the input, beside another encoding.

        tokens     1 2 + 3 4 5 =
        places p   1 2 0 1 2 3 0     x'_i = x_i + E[p_i + o] for digits,   x'_i = x_i + E[0] for all other tokens

    E is learned; o is drawn from 0 .. max_offset for every update, and is 0 in evaluation. A digit is a token whose
    whole text is a digit. The authors write the least significant digit first; here the order of the text is kept.

    Source: McLeish et al., "Transformers Can Do Arithmetic with the Right Embeddings" (2024), arXiv:2405.17399, and the
    authors' code (mcleish7/arithmetic); here E starts at the spread of the token embeddings, and E[0] at 0.
    Beyond training length: defined as far as the encoding inside; numbers max_offset digits longer have trained rows.
    Checked against: plain loops; what the encoding inside is checked against.
    """

    sought = (tuple("0123456789"),)
    missing = "a digit by itself: all tokens get the same vector"

    def __init__(
        self, shape: Shape, inner: str = "none", inner_options: dict[str, Any] = NO_OPTIONS,
        rows: int = 1024, max_offset: Offset = 99, others: Literal["zero", "random"] = "zero",
    ) -> None:  # fmt: skip
        self.expect(rows >= max_offset + 2, "rows", rows, f"at least max_offset + 2, {max_offset + 2}")
        super().__init__(shape, rows, inner, inner_options)
        self.max_offset = max_offset
        if others == "zero":
            with torch.no_grad():
                self.table[0] = 0

    def set_progress(self, done: float) -> None:
        draw = generator(self.seed, "abacus", repr(done))
        self.drawn.fill_(float(torch.randint(self.max_offset + 1, (), generator=draw)))

    def places(self, kinds: Tensor) -> Tensor:
        digit = kinds == 1
        place = 1 + places((digit & ~F.pad(digit, (1, -1))).cumsum(-1))
        if self.training:
            place = place + self.drawn.long()
        return torch.where(digit, place.clamp(max=len(self.table) - 1), 0)


class PositionCoupling(Textual):
    """Position coupling: tokens of equal meaning share a learned position, such as digits of equal significance.

        tokens       $ 6 5 3 + 0 4 9 = 2 0 7 0 $       653 + 049, the answer from its last digit on
        positions p  0 2 3 4 5 2 3 4 5 4 3 2 1 0       x'_i = x_i + E[p_i + o],   x'_i = x_i + E[0] for separators

    Each number of a question counts upwards from 2, with the `+` behind it. `=` belongs to the answer: a `reversed` one
    counts down from where the last number ended and stays at 1; a `plain` one counts upwards from 1, and numbers begin
    at 2 + `longer`, the tokens that it has more than a number. In training o is drawn for every update, at most to
    where the problem's largest position has the last row, `max_position`; in evaluation it is 0.

    Source: Cho et al., "Position Coupling: Improving Length Generalization of Arithmetic Transformers Using Task
    Structure" (2024), arXiv:2405.20671, section 3, and the authors' code (HanseulJo/position-coupling), for addition
    and copies. There each problem draws its own o. E starts at the spread of the token embeddings.
    Beyond training length: defined as far as the encoding inside; positions beyond `max_position` share the last row.
    Checked against: plain loops over the tokens; what the encoding inside is checked against.
    """

    name = "coupling"
    sought = (ANSWER,), (SEPARATOR,), ("+",)
    missing = f"'{ANSWER}' by itself: no answer is coupled to its question"

    def __init__(
        self, shape: Shape, inner: str = "none", inner_options: dict[str, Any] = NO_OPTIONS,
        answer: Literal["reversed", "plain"] = "reversed", longer: Offset = 1, max_position: int | None = None,
    ) -> None:  # fmt: skip
        begin = 2 if answer == "reversed" else 2 + longer  # the position where a number begins
        last = 2 * shape.train_length if max_position is None else max_position
        self.expect(last >= begin, "max_position", max_position, f"at least {begin}, or null for 2 training lengths")
        super().__init__(shape, last + 1, inner, inner_options)
        self.begin, self.reversed = begin, answer == "reversed"

    def set_progress(self, done: float) -> None:  # the share of the largest possible shift
        self.drawn.fill_(float(torch.rand((), generator=generator(self.seed, "position coupling", repr(done)))))

    def places(self, kinds: Tensor) -> Tensor:
        answer, separator, closes = kinds == 1, kinds == 2, kinds >= 2
        within = places((answer | F.pad(closes, (1, -1))).cumsum(-1))  # its part of the problem, from 0
        first = torch.arange(kinds.shape[-1], device=kinds.device) - within
        before = F.pad((within + 1).masked_fill(closes, 0), (1, -1)).gather(-1, first)  # size of the part before
        counted = (before + 2 - within).clamp(min=1) if self.reversed else within + 1
        place = torch.where(answer.gather(-1, first), counted, self.begin + within).masked_fill(separator, 0)
        last = len(self.table) - 1
        if self.training:
            room = (last - place.amax(-1, keepdim=True)).clamp(min=0)
            place = torch.where(place > 0, place + (self.drawn * (room + 1)).long().minimum(room), 0)
        return place.clamp(max=last)


def ids_of(texts: Iterable[str], vocabulary: tuple[str, ...]) -> Tensor:
    """Return the ids (N,) of the tokens with one of these texts; none without a vocabulary."""
    wanted = set(texts)
    return torch.tensor([i for i, text in enumerate(vocabulary) if text in wanted], dtype=torch.long)


def among(ids: Tensor, chosen: Tensor) -> Tensor:
    """Return whether each token id (B, T) is among the chosen (N,): (B, T) bool."""
    return (ids[..., None] == chosen).any(-1)  # torch.isin may make the host wait for its device


def places(numbers: Tensor) -> Tensor:
    """Return the count of earlier tokens with the same number: (B, T), of numbers that never fall within a row."""
    return torch.arange(numbers.shape[-1], device=numbers.device) - torch.searchsorted(numbers, numbers)


def remarks_without(encoding: Encoding, ids: Tensor, missing: str) -> list[str]:
    """Return a remark if the vocabulary is known and has none of the tokens that an encoding looks for."""
    absent = encoding.shape.vocabulary and not len(ids)
    return [f"{encoding.name}: no token of the vocabulary is {missing}"] if absent else []
