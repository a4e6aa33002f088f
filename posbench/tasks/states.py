"""Tasks that follow a state through the text: addition with its carries, counting,
flip-flop, parity.
"""

import dataclasses
from typing import Annotated, ClassVar, Literal

import numpy as np
from annotated_types import Ge

from posbench.options import Count, Fraction
from posbench.tasks.base import Integers, Problems, Task

# ids
_DIGIT = 2  # of 0, in addition and parity
_PLUS, _HINT = 12, 13  # in addition; _HINT is h0


def _drawn_of_three(
    rng: np.random.Generator, shape: tuple[int, int], share: float
) -> Integers:
    """Return numbers from 0 to 2: 2 with probability `share`, else 0 or 1 with equal
    chances.
    """
    borders = [(1 - share) / 2, 1 - share]
    return np.searchsorted(borders, rng.random(shape), side="right")


@dataclasses.dataclass(frozen=True)
class Addition(Task):
    """Addition of two numbers with the same number of digits, most significant first,
    with leading zeros.

        length 2         reads   <|endoftext|> 4 7 + 8 5 = 1 3 2
                         scores                          1 3 2 <|endoftext|>
        answer=reversed  reads   <|endoftext|> 4 7 + 8 5 = 2 3 1
                         scores                          2 3 1 <|endoftext|>
        hints=64         reads   <|endoftext|> h8 0 h9 4 h10 7 + h8 0 h9 8 h10 5 =
                                 h8 1 h9 3 h10 2
                         scores  h8 1 h9 3 h10 2 <|endoftext|>

    Length counts the digits of each number, drawn independently and uniformly; the
    answer has one more. A reversed answer follows the order of the carries. Index hints
    mark digits of the same place. A problem's hints begin at a random one, so that
    training covers all of them. The end of the answer and its hints are scored, too.
    Source: Kazemnejad et al. (2023), arXiv:2305.19466; hints, reversed answers: Zhou et
    al. (2023), arXiv:2310.16028.
    Deviates: both numbers have equally many digits; with hints they get a leading zero,
    for the answer's first hint.
    """

    shortest: int = 1
    longest: int = 6
    # reversed: the least significant digit of the answer comes first
    answer: Literal["plain", "reversed"] = "plain"
    # number of index hints, at least longest + 1; 0 = none
    hints: Annotated[int, Ge(0)] = 0
    words: ClassVar[str] = "= 0 1 2 3 4 5 6 7 8 9 +"
    kinds: ClassVar[dict[str, str]] = {"h": "hints"}

    @property
    def limit(self) -> int | None:
        return self.hints - 1 if self.hints else None

    def size(self, length: int) -> int:
        return 6 * length + 9 if self.hints else 3 * length + 4

    def drawn(self, rng: np.random.Generator, length: int, count: int) -> Problems:
        terms = rng.integers(0, 10, (2, count, length))
        total = np.pad(terms.sum(axis=0), ((0, 0), (1, 0)))
        for place in range(length, 0, -1):
            total[:, place - 1] += total[:, place] // 10  # the carry
        if self.hints:
            # a leading zero, for the answer's first hint
            terms = np.pad(terms, ((0, 0), (0, 0), (1, 0)))

        numbers = [_DIGIT + digits[:, :, None] for digits in (*terms, total % 10)]
        if self.hints:
            first = rng.integers(0, self.hints - length, (count, 1, 1))
            hints = _HINT + first + np.arange(length + 1)[:, None]
            numbers = [np.concatenate([hints, digits], axis=2) for digits in numbers]
        left, right, answer = numbers  # (count, digits, 1), or 2 with hints
        if self.answer == "reversed":
            answer = answer[:, ::-1]

        plus = np.full((count, 1), _PLUS)
        question = [left.reshape(count, -1), plus, right.reshape(count, -1)]
        return Problems.answered(
            np.concatenate(question, axis=1), answer.reshape(count, -1), end=True
        )

    def trivial(self, problems: Problems) -> Integers:
        """Guess 0 for every digit; hints and where the answer ends are known."""
        labels = problems.ids[:, 1:]
        is_digit = (labels >= _DIGIT) & (labels < _DIGIT + 10)
        return np.where(is_digit, _DIGIT, labels)


@dataclasses.dataclass(frozen=True)
class Counting(Task):
    """Counting: how many x since the last reset?

        length 6    reads   <|endoftext|>  x  .  reset  x  x  .  =
                    scores                                       2

    Length counts the tokens before the question. Each is a reset with probability
    `reset`, otherwise an x or a dot with equal chances. The answer, one token, is the
    number of x after the last reset (all x if there is none).
    Source: after Golovneva et al. (2024), arXiv:2405.18719, whose variables are
    assigned and incremented.
    Deviates: one variable, which is only reset to zero. With 192 tokens one problem in
    150 has a count above 24.
    """

    shortest: int = 4
    longest: int = 24
    reset: Fraction = 0.1  # probability of a reset
    highest: Count = 192  # the highest count with a token, and the longest problem
    words: ClassVar[str] = "= x . reset"
    none: ClassVar[int] = 5  # the id of the count 0

    @property
    def limit(self) -> int:
        return self.highest

    @property
    def symbols(self) -> tuple[str, ...]:
        return (*super().symbols, *map(str, range(self.highest + 1)))

    def drawn(self, rng: np.random.Generator, length: int, count: int) -> Problems:
        counted, reset = 2, 4  # ids; the dot is between them
        text = counted + _drawn_of_three(rng, (count, length), self.reset)
        places = np.arange(length)
        last_reset = np.where(text == reset, places, -1).max(axis=1, keepdims=True)
        is_counted = (text == counted) & (places > last_reset)
        counts = is_counted.sum(axis=1, keepdims=True)
        return Problems.answered(text, self.none + counts)

    def trivial(self, problems: Problems) -> Integers:
        return np.full(problems.scored.shape, self.none)


@dataclasses.dataclass(frozen=True)
class FlipFlop(Task):
    """Flip-flop: a memory of one bit that is written, ignored and read.

        length 5    reads   <|endoftext|>  w  1  i  0  r  1  w  0  r
                    scores                             1           0

    Length counts the pairs of an instruction and a bit. The first is a write (w) and
    the last a read (r); those between are ignored (i) with probability `ignore`;
    otherwise they are writes or reads with equal chances. The bit after a read is the
    one written last, and it is scored. The other bits are drawn independently and
    uniformly.
    Source: Liu et al. (2023), arXiv:2306.00946: trained with 256 pairs; tested also
    with `ignore` at 0.98 and at 0.1.
    Deviates: trained at 4 to 32 pairs.
    """

    shortest: int = 4
    longest: int = 32
    ignore: Fraction = 0.8  # probability that an instruction is `i`
    least: ClassVar[int] = 2
    variations: ClassVar[tuple[str, ...]] = ("ignore=0.98", "ignore=0.1")
    words: ClassVar[str] = "w r i 0 1"

    def size(self, length: int) -> int:
        return 2 * length

    def drawn(self, rng: np.random.Generator, length: int, count: int) -> Problems:
        write, reading, zero = 1, 2, 4  # ids; `i` is 3
        instructions = write + _drawn_of_three(rng, (count, length), self.ignore)
        instructions[:, 0] = write
        instructions[:, -1] = reading
        bits = rng.integers(0, 2, (count, length))

        # A bit that is read is the one of the last write before it.
        writes = np.where(instructions == write, np.arange(length), 0)
        last_writes = np.maximum.accumulate(writes, axis=1)
        written = np.take_along_axis(bits, last_writes, axis=1)
        is_read = instructions == reading

        ids = np.zeros((count, 1 + 2 * length), np.int64)
        ids[:, 1::2] = instructions
        ids[:, 2::2] = zero + np.where(is_read, written, bits)
        scored = np.zeros((count, 2 * length), np.bool_)
        scored[:, 1::2] = is_read
        return Problems(ids, scored)

    def trivial(self, problems: Problems) -> Integers:
        return problems.before(1)


@dataclasses.dataclass(frozen=True)
class Parity(Task):
    """Parity: is the number of ones odd? The negative control.

        length 4    reads   <|endoftext|>  1  0  1  1  =
                    scores                             1

    Length counts the bits, drawn independently and uniformly. If a result shows
    extrapolation, suspect an error.
    Source: Ruoss et al. (2023), arXiv:2305.16843, and Kazemnejad et al. (2023),
    arXiv:2305.19466: always near chance.
    Deviates: trained at lengths 2 to 16.
    """

    shortest: int = 2
    longest: int = 16
    words: ClassVar[str] = "= 0 1"

    def drawn(self, rng: np.random.Generator, length: int, count: int) -> Problems:
        bits = rng.integers(0, 2, (count, length))
        parity = bits.sum(axis=1, keepdims=True) % 2
        return Problems.answered(_DIGIT + bits, _DIGIT + parity)

    def trivial(self, problems: Problems) -> Integers:
        return problems.before(1)
