"""Wrappers that draw positions, or take them from the texts of tokens, instead of 0 ..
T-1; a batch shares one draw.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings.base import Encoding, Shape, Stretch, check_length
from posbench.encodings.distance import default_slopes
from posbench.encodings.wrapper import NO_OPTIONS, Wrapper
from posbench.errors import UserError
from posbench.options import AtLeast1, Count, Natural, NonNegative, Positive
from posbench.randomness import generator
from posbench.tasks.base import ANSWER, SEPARATOR

SEPARATORS = [".", "\n"]  # texts that end a segment of BiPE: a sentence or a line


class Repositioned(Wrapper):
    """Base of wrappers that give the inner encoding drawn positions; a subclass
    implements `chosen`.
    """

    adds = ("positions",)
    fractional = False

    def adopt(self, inners: Sequence[Encoding]) -> None:
        super().adopt(inners)
        refuses = self.fractional and self.whole_positions
        if refuses or "positions" in inners[0].hooks:
            raise UserError(
                f"encoding.inner is '{inners[0].name}', which cannot take these"
                " positions: expected rope"
            )

    def positions(self, ids: Tensor, generator: torch.Generator | None) -> Tensor:
        length = ids.shape[-1]
        check_length(self, length)
        if generator is None:
            generator = torch.Generator(ids.device).manual_seed(0)
        places = torch.arange(length, device=ids.device)[None]
        return self.chosen(places, generator)

    def chosen(self, places: Tensor, generator: torch.Generator) -> Tensor:
        """Return the positions of tokens at these places, (1, T)."""
        raise NotImplementedError


class Ranged(Repositioned):
    """Base of wrappers with positions below M = `max_length`, by default 16 training
    lengths; the inner encoding is made for M positions.
    """

    def wrap_range(
        self, inner: str, options: Mapping[str, Any], max_length: int | None
    ) -> None:
        """Build the inner encoding for M positions, and adopt it."""
        train_length = self.shape.train_length
        self.range = 16 * train_length  # M
        if max_length is not None:
            self.range = max_length
        self.expect(
            train_length <= self.range,
            "max_length",
            max_length,
            "at least train_length, or null",
        )
        longer = dataclasses.replace(self.shape, train_length=self.range)
        self.wrap(inner, options, longer)

    def reached(self, inner: Encoding, stretch: Stretch) -> Stretch:
        return dataclasses.replace(stretch, train_length=self.range)


class Randomized(Ranged):
    """Randomized positions around another encoding: short inputs show all the positions
    and distances of long ones.

        positions = sort(sample of T from {0 .. M-1}),   in evaluation, too;
        `continuous`: real numbers from 0 to M

    T counts a row's padding, too: in training a short problem or document gets the
    first of the row's positions.

    Source: Ruoss et al. (2023), arXiv:2305.16843, section 3; Shimizu et al. (2026),
    arXiv:2602.14050 (continuous).
    Beyond training length: defined up to M tokens, `max_length`, all of whose positions
    training has shown.
    Checked against: the implementations that the inner encoding is checked against, at
    positions that jump.
    """

    def __init__(
        self,
        shape: Shape,
        inner: str = "rope",
        inner_options: dict[str, Any] = NO_OPTIONS,
        max_length: int | None = None,
        continuous: bool = False,
    ) -> None:
        super().__init__(shape)
        self.fractional = continuous
        self.wrap_range(inner, inner_options, max_length)

    def adopt(self, inners: Sequence[Encoding]) -> None:
        super().adopt(inners)
        if not self.fractional:
            self.max_length = min(self.range, self.max_length or self.range)
        self.length_dependent = True  # a longer input draws other positions

    def chosen(self, places: Tensor, generator: torch.Generator) -> Tensor:
        length, device = places.shape[1], places.device
        if self.fractional:
            draws = torch.rand(1, length, generator=generator, device=device)
            return self.range * draws.sort().values
        draws = torch.randperm(self.range, generator=generator, device=device)
        return draws[:length].sort().values[None]


class SHAPE(Repositioned):
    """Shifted absolute positions (SHAPE) around another encoding, so that it cannot
    rely on where a text begins.

        positions = o, o + 1, o + 2 ..   o drawn from 0 .. shift-1 in training,
        o = shift in evaluation

    Source: Kiyono et al. (2021), arXiv:2109.05644, and the authors' code
    (butsugiri/shape), which draws per sequence.
    Beyond training length: defined as far as the encoding inside, which is made for
    train_length + shift positions.
    Checked against: what the encoding inside is checked against.
    """

    def __init__(
        self,
        shape: Shape,
        inner: str = "sinusoidal",
        inner_options: dict[str, Any] = NO_OPTIONS,
        shift: Count = 500,
    ) -> None:
        super().__init__(shape)
        self.shift = shift
        longer = dataclasses.replace(shape, train_length=shape.train_length + shift)
        self.wrap(inner, inner_options, longer)

    def adopt(self, inners: Sequence[Encoding]) -> None:
        super().adopt(inners)
        if self.max_length is not None:
            self.max_length -= self.shift

    def reached(self, inner: Encoding, stretch: Stretch) -> Stretch:
        if "embed" not in inner.hooks:  # distances stay those of the input
            return stretch
        return Stretch(stretch.train_length + self.shift, stretch.length + self.shift)

    def chosen(self, places: Tensor, generator: torch.Generator) -> Tensor:
        device = places.device
        drawn = torch.randint(self.shift, (1, 1), generator=generator, device=device)
        if self.training:
            return places + drawn
        return places + self.shift


class PoSE(Ranged):
    """Positional skip-wise training (PoSE) around another encoding: positions jump
    once, so that short inputs show the distances of long ones.

        positions = 0 .. c-1, c+u, c+u+1 ..   in training,   0, 1 .. in evaluation
        c drawn from 1 .. (L+1)/2,   u from 0 .. M-L,   L the training length

    Source: Zhu et al. (2023), arXiv:2309.10400, with two chunks as in the authors' code
    (dwzhu-pku/PoSE), which draws per sequence and skips text, too.
    Beyond training length: defined as far as the encoding inside, which is made for M
    positions, `max_length`; training has shown all distances below M.
    Checked against: what the encoding inside is checked against, at positions that
    jump; the draws against the authors' recipe.
    """

    def __init__(
        self,
        shape: Shape,
        inner: str = "rope",
        inner_options: dict[str, Any] = NO_OPTIONS,
        max_length: int | None = None,
    ) -> None:
        super().__init__(shape)
        self.wrap_range(inner, inner_options, max_length)

    def chosen(self, places: Tensor, generator: torch.Generator) -> Tensor:
        if not self.training:
            return places
        length = self.shape.train_length
        half = (length + 1) // 2
        most = self.range - length
        device = places.device
        c = torch.randint(1, half + 1, (1, 1), generator=generator, device=device)
        u = torch.randint(most + 1, (1, 1), generator=generator, device=device)
        return places + u * (places >= c)


class CAPE(Repositioned):
    """Continuous augmented positions (CAPE) around another encoding, which then relies
    on neither place nor scale.

        positions_i = (i + D + e_i)·exp(l) in training,   positions_i = i in evaluation
        D from -global_shift .. global_shift,   e_i from -local_shift .. local_shift,
        l from ±ln(scaling), all uniform

    Source: Likhomanenko et al. (2021), arXiv:2106.03143; defaults of gcambara/cape,
    which draws per sequence.
    Beyond training length: defined as far as the encoding inside, which saw positions
    up to (T + both shifts)·scaling.
    Checked against: plain loops of sinusoids and of ALiBi, at positions that need not
    be whole.
    """

    fractional = True

    def __init__(
        self,
        shape: Shape,
        inner: str = "sinusoidal",
        inner_options: dict[str, Any] = NO_OPTIONS,
        global_shift: NonNegative = 5.0,
        local_shift: NonNegative = 0.5,
        scaling: AtLeast1 = 1.03,
    ) -> None:
        super().__init__(shape)
        self.global_shift = global_shift
        self.local_shift = local_shift
        self.scaling = scaling
        self.wrap(inner, inner_options)

    def chosen(self, places: Tensor, generator: torch.Generator) -> Tensor:
        if not self.training:
            return places

        def drawn(limit: float, count: int) -> Tensor:
            shares = torch.rand(1, count, generator=generator, device=places.device)
            return limit * (2 * shares - 1)

        moved = places + drawn(self.global_shift, 1)
        stretch = drawn(math.log(self.scaling), 1).exp()
        return (moved + drawn(self.local_shift, places.shape[1])) * stretch


class Textual(Wrapper):
    """Base of encodings by token text: adds a row of a learned table to each token; a
    subclass implements `places`.
    """

    adds = ("embed",)
    # the kind of each text; all other tokens are of kind 0
    sought: ClassVar[dict[str, int]]

    def __init__(
        self, shape: Shape, rows: int, inner: str, inner_options: dict[str, Any]
    ) -> None:
        super().__init__(shape)
        # seeds the draw of every update
        self.seed = int(torch.randint(2**31, (), device="cpu"))
        self.table = nn.Parameter(torch.randn(rows, shape.d_model) * shape.token_rms)
        kinds = [self.sought.get(text, 0) for text in shape.vocabulary]
        kinds.append(0)  # of unknown tokens
        self.kinds = nn.Buffer(torch.tensor(kinds), persistent=False)
        self.drawn = nn.Buffer(torch.zeros(()), persistent=False)
        self.wrap(inner, inner_options)

    def embed(self, x: Tensor, positions: Tensor, ids: Tensor | None = None) -> Tensor:
        x = super().embed(x, positions, ids)
        unknown = len(self.kinds) - 1
        if ids is None:
            ids = self.kinds.new_full(x.shape[:2], unknown)
        kinds = self.kinds[ids.clamp(max=unknown)]  # (B, T)
        return (x + F.embedding(self.places(kinds), self.table)).to(x.dtype)

    def places(self, kinds: Tensor) -> Tensor:
        """Return the table row of each token, (B, T), from the kinds of the tokens (B,
        T).
        """
        raise NotImplementedError


class Abacus(Textual):
    """Abacus embeddings: where a digit stands within its number, at the input, beside
    another encoding.

        tokens     1 2 + 3 4 5 =
        places p   1 2 0 1 2 3 0
        x'_i = x_i + E[p_i + o] for digits,   x'_i = x_i + E[0] for all other tokens

    o is drawn from 0 .. max_offset for every update, and is 0 in evaluation. A digit is
    a token by itself.

    Source: McLeish et al. (2024), arXiv:2405.17399; here digits are in the text's
    order, E starts as token vectors do.
    Beyond training length: defined as far as the encoding inside; rows are trained for
    max_offset digits more.
    Checked against: plain loops; what the encoding inside is checked against.
    """

    sought = dict.fromkeys("0123456789", 1)

    def __init__(
        self,
        shape: Shape,
        inner: str = "none",
        inner_options: dict[str, Any] = NO_OPTIONS,
        rows: int = 1024,
        max_offset: Natural = 99,
        others: Literal["zero", "random"] = "zero",
    ) -> None:
        self.expect(
            rows >= max_offset + 2,
            "rows",
            rows,
            f"at least max_offset + 2, {max_offset + 2}",
        )
        super().__init__(shape, rows, inner, inner_options)
        self.max_offset = max_offset
        if others == "zero":
            nn.init.zeros_(self.table[0])

    def set_progress(self, done: float) -> None:
        draws = generator(self.seed, "abacus", repr(done))
        self.drawn.fill_(torch.randint(self.max_offset + 1, (), generator=draws))

    def places(self, kinds: Tensor) -> Tensor:
        is_digit = kinds == 1
        begins = is_digit & ~F.pad(is_digit, (1, -1))
        place = 1 + places(begins.cumsum(-1))
        if self.training:
            place = place + self.drawn.long()
        place = place.clamp(max=len(self.table) - 1)
        return torch.where(is_digit, place, 0)


class PositionCoupling(Textual):
    """Position coupling: tokens of equal meaning share a learned position, such as
    digits of equal significance.

        tokens       $ 6 5 3 + 0 4 9 = 2 0 7 0 $   653 + 049, the answer from its last
        positions p  0 2 3 4 5 2 3 4 5 4 3 2 1 0   digit on
        x'_i = x_i + E[p_i + o],   x'_i = x_i + E[0] for separators

    Each number of a question counts up from 2, with the `+` after it. From `=` on, a
    `reversed` answer counts down to 1 from one past the last number, and stays there; a
    `plain` one counts up from 1, and numbers begin at 2 + `longer`, its number of
    additional tokens. o is drawn for every update, up to the last row `max_position`,
    and is 0 otherwise.

    Source: Cho et al. (2024), arXiv:2405.20671, section 3 (addition, copies); E starts
    as token embeddings do.
    Beyond training length: defined as far as the encoding inside; positions beyond
    `max_position` share the last row.
    Checked against: plain loops over the tokens; what the encoding inside is checked
    against.
    """

    name = "coupling"
    sought: ClassVar = {ANSWER: 1, SEPARATOR: 2, "+": 3}

    def __init__(
        self,
        shape: Shape,
        inner: str = "none",
        inner_options: dict[str, Any] = NO_OPTIONS,
        answer: Literal["reversed", "plain"] = "reversed",
        longer: Natural = 1,
        max_position: int | None = None,
    ) -> None:
        begin = 2  # the position where a number begins
        if answer == "plain":
            begin = 2 + longer
        else:
            self.expect(
                longer == 1, "longer", longer, "1, since answer=reversed reads none"
            )
        last = max_position
        if last is None:
            last = 2 * shape.train_length
        self.expect(
            last >= begin,
            "max_position",
            max_position,
            f"at least {begin}, or null for 2 training lengths",
        )
        super().__init__(shape, last + 1, inner, inner_options)
        self.begin = begin
        self.reversed = answer == "reversed"

    # draws the share of the largest possible shift
    def set_progress(self, done: float) -> None:
        draws = generator(self.seed, "position coupling", repr(done))
        self.drawn.fill_(torch.rand((), generator=draws))

    def places(self, kinds: Tensor) -> Tensor:
        is_separator = kinds == 2
        place = self._unshifted(kinds).masked_fill(is_separator, 0)
        last = len(self.table) - 1
        if self.training:
            room = last - place.amax(-1, keepdim=True)
            room = room.clamp(min=0)
            shift = (self.drawn * (room + 1)).long().minimum(room)  # o
            place = torch.where(place > 0, place + shift, 0)
        return place.clamp(max=last)

    def _unshifted(self, kinds: Tensor) -> Tensor:
        """Return positions p (B, T), before separators get 0."""
        is_answer = kinds == 1  # the `=`, which begins the answer
        closes = kinds >= 2  # a number
        begins = is_answer | F.pad(closes, (1, -1))
        index = places(begins.cumsum(-1))  # place within a part of the problem, from 0
        first = torch.arange(kinds.shape[-1], device=kinds.device) - index
        order = index + 1
        if self.reversed:
            # the size of the part before
            sizes = F.pad((index + 1).masked_fill(closes, 0), (1, -1))
            order = (sizes.gather(-1, first) + 2 - index).clamp(min=1)
        return torch.where(is_answer.gather(-1, first), order, self.begin + index)


class BiPE(Wrapper):
    """Bilevel positions (BiPE): places within segments at the input, the numbers of the
    segments in another encoding.

        tokens       a b . c d . e
        segments s   0 0 0 1 1 1 2
        places p     0 1 2 0 1 2 0
        x'_i = x_i + E[p_i],   E of train_length rows, the last for all beyond

    Segments are what the encoding inside, a relative one, is given as positions.

    A segment ends with a token whose text, without spaces around it, is in
    `separators`.

    Source: He et al. (2024), arXiv:2401.16421, and the authors' code, whose ALiBi
    slopes are multiplied by 96 here.
    Beyond training length: defined as far as the encoding inside; texts have more
    segments, but not longer ones.
    Checked against: plain loops of segments, places and ALiBi; what the encoding inside
    is checked against.
    """

    adds = ("positions", "embed")

    def __init__(
        self,
        shape: Shape,
        inner: str = "rope",
        inner_options: dict[str, Any] = NO_OPTIONS,
        separators: list[str] = SEPARATORS,
        alibi_factor: Positive = 96.0,
    ) -> None:
        super().__init__(shape)
        if inner == "alibi" and inner_options.get("slopes") is None:
            slopes = [alibi_factor * slope for slope in default_slopes(shape.n_heads)]
            inner_options = {**inner_options, "slopes": slopes}
        ends = [text.strip(" ") in separators for text in shape.vocabulary]
        ends.append(False)  # of unknown tokens
        self.separators = nn.Buffer(torch.tensor(ends), persistent=False)
        table = torch.randn(shape.train_length, shape.d_model)
        self.table = nn.Parameter(table * shape.token_rms)
        self.wrap(inner, inner_options)
        if self.inner_encodings[0].hooks & {"positions", "token_dim", "embed"}:
            raise UserError(
                f"encoding.inner is '{inner}': expected a relative encoding, such as"
                " rope or alibi"
            )

    def positions(self, ids: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return the number of each token's segment, (B, T)."""
        check_length(self, ids.shape[-1])
        known = ids.clamp(max=len(self.separators) - 1)
        begins = F.pad(self.separators[known], (1, -1))
        return begins.cumsum(-1)

    def embed(self, x: Tensor, positions: Tensor, ids: Tensor | None = None) -> Tensor:
        segments = positions.new_zeros(x.shape[:2])
        if ids is not None:
            segments = self.positions(ids, None)
        place = places(segments).clamp(max=len(self.table) - 1)
        return (x + F.embedding(place, self.table)).to(x.dtype)


def places(numbers: Tensor) -> Tensor:
    """Return how many earlier tokens have the same number, (B, T), for numbers (B, T)
    that never fall within a row.
    """
    index = torch.arange(numbers.shape[-1], device=numbers.device)
    first = torch.searchsorted(numbers, numbers)  # of the tokens with the same number
    return index - first
