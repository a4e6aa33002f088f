"""Tasks that follow a state through the text: addition with its carries, counting, flip-flop, parity."""

import dataclasses
from typing import ClassVar, Literal

import numpy as np

from posbench.tasks.base import ANSWER, SEPARATOR, Integers, Problems, Task, answered, numbered, tokens_before

_DIGIT = 2  # the id of 0 in addition and parity


@dataclasses.dataclass(frozen=True)
class Addition(Task):
    """Addition of two numbers with the same number of digits, most significant first, with leading zeros.

        length 2         reads   <|endoftext|> 4 7 + 8 5 = 1 3 2
                         scores                          1 3 2 <|endoftext|>
        answer=reversed  reads   <|endoftext|> 4 7 + 8 5 = 2 3 1
                         scores                          2 3 1 <|endoftext|>
        hints=64         reads   <|endoftext|> h8 0 h9 4 h10 7 + h8 0 h9 8 h10 5 =  h8 1  h9 3   h10 2
                         scores                                                  h8 1  h9 3  h10 2   <|endoftext|>

    Length counts the digits of each number, drawn independently and uniformly; the answer has one more. A reversed
    answer follows the order of the carries. Index hints mark digits of the same place with the same hint. The hints of
    a problem begin at a random one, so that all of them are trained. The end of the answer is scored too, and so are
    its hints.

    Source: Kazemnejad et al. (2023), arXiv:2305.19466, for the task; Zhou et al., "What Algorithms can Transformers
    Learn?" (2023), arXiv:2310.16028, for index hints and the reversed answer.
    Deviates: both numbers have the same number of digits, so that problems of one length have one size; with hints both
    get a leading zero, so that the question contains every hint of the answer.
    """

    shortest: int = 1
    longest: int = 6
    answer: Literal["plain", "reversed"] = "plain"  # reversed: the least significant digit of the answer comes first
    hints: int = 0  # number of index hints, at least longest + 1; 0 = none

    trivial_reader: ClassVar[str] = "says 0 for every digit, and knows the hints and where the answer ends"

    def __post_init__(self) -> None:
        if self.hints:
            self.expect_number("hints", 2)
        super().__post_init__()

    @property
    def limit(self) -> int | None:
        return self.hints - 1 if self.hints else None

    @property
    def symbols(self) -> tuple[str, ...]:
        return (SEPARATOR, ANSWER, *map(str, range(10)), "+", *numbered("h", self.hints))

    def size(self, length: int) -> int:
        return 6 * length + 9 if self.hints else 3 * length + 4

    def drawn(self, rng: np.random.Generator, length: int, count: int) -> Problems:
        terms = rng.integers(0, 10, (2, count, length))
        total = _sum(*terms)
        plus, hint = np.full((count, 1), 12), 13  # ids
        places: Integers | None = None  # the hints of the digits, the most significant first
        if self.hints:
            terms = np.pad(terms, ((0, 0), (0, 0), (1, 0)))
            places = hint + rng.integers(0, self.hints - length, (count, 1)) + np.arange(length + 1)
        order = slice(None, None, -1) if self.answer == "reversed" else slice(None)
        left, right = (_written(term, places) for term in terms)
        answer = _written(total[:, order], None if places is None else places[:, order])
        return answered(np.concatenate([left, plus, right], axis=1), answer, end=True)

    def trivial(self, problems: Problems) -> Integers:
        guesses = np.full(problems.scored.shape, _DIGIT)
        guesses[:, -1] = 0
        if self.hints:
            hints = problems.ids[:, 1 : problems.ids.shape[1] // 3 : 2]
            guesses[:, -2 * hints.shape[1] - 1 : -1 : 2] = hints[:, ::-1] if self.answer == "reversed" else hints
        return guesses


def _sum(left: Integers, right: Integers) -> Integers:
    """Digits (count, n + 1) of the sum of numbers whose digits are (count, n), the most significant first."""
    total = np.pad(left + right, ((0, 0), (1, 0)))
    for place in range(total.shape[1] - 1, 0, -1):
        total[:, place - 1] += total[:, place] // 10
    return total % 10


def _written(digits: Integers, hints: Integers | None) -> Integers:
    """Ids of digits (count, n), each preceded by its hint if hints are given."""
    if hints is None:
        return _DIGIT + digits
    return np.stack([hints, _DIGIT + digits], axis=2).reshape(len(digits), -1)


@dataclasses.dataclass(frozen=True)
class Counting(Task):
    """Counting: how many x since the last reset?

        length 6    reads   <|endoftext|>  x  .  reset  x  x  .  =
                    scores                                       2

    Length counts the tokens before the question. Each is a reset with probability `reset`, otherwise an x or a dot with
    equal chances. The answer is the number of x after the last reset (all x if there is none). It is one token.

    Source: after the counting task of Golovneva et al., "Contextual Position Encoding: Learning to Count What's
    Important" (2024), arXiv:2405.18719, whose variables are assigned and incremented.
    Deviates: a single variable, which is only ever set to zero, and one token an instruction. Resets keep counts small
    at any length: at 192 tokens one problem in 150 has a count above 24, which training never shows.
    """

    shortest: int = 4
    longest: int = 24
    reset: float = 0.1  # probability of a reset
    highest: int = 192  # the highest count with a token, and the longest problem

    none: ClassVar[int] = 5  # the id of the count 0
    numbers: ClassVar[dict[str, int]] = {"highest": 1}
    shares: ClassVar[dict[str, str]] = {"reset": "a probability from 0 to 1"}
    trivial_reader: ClassVar[str] = "always says 0"

    @property
    def limit(self) -> int:
        return self.highest

    @property
    def symbols(self) -> tuple[str, ...]:
        return (SEPARATOR, ANSWER, "x", ".", "reset", *map(str, range(self.highest + 1)))

    def size(self, length: int) -> int:
        return length + 2

    def drawn(self, rng: np.random.Generator, length: int, count: int) -> Problems:
        chance = rng.random((count, length))
        counted, reset = 2, 4  # ids
        text = counted + (chance >= (1 - self.reset) / 2) + (chance >= 1 - self.reset)
        last = np.max(np.where(text == reset, np.arange(length), -1), axis=1, keepdims=True)
        counts = ((text == counted) & (np.arange(length) > last)).sum(axis=1, keepdims=True)
        return answered(text, self.none + counts)

    def trivial(self, problems: Problems) -> Integers:
        return np.full(problems.scored.shape, self.none)


@dataclasses.dataclass(frozen=True)
class FlipFlop(Task):
    """Flip-flop: a memory of one bit that is written, ignored and read.

        length 5    reads   <|endoftext|>  w  1  i  0  r  1  w  0  r
                    scores                             1           0

    Length counts the pairs of an instruction and a bit. The first is a write (w) and the last a read (r); those between
    are ignored (i) with probability `ignore`; otherwise they are writes or reads with equal chances. The bit after a
    read is the one written last. Only these bits are scored; the other bits are drawn independently and uniformly.

    Source: Liu et al., "Exposing Attention Glitches with Flip-Flop Language Modeling" (2023), arXiv:2306.00946: trained
    at `ignore` 0.8 with 256 pairs, tested also at 0.98 (sparse: the last write is far away) and at 0.1 (dense: many
    writes distract).
    Deviates: trained at 4 to 32 pairs.
    """

    shortest: int = 4
    longest: int = 32
    ignore: float = 0.8  # probability that an instruction is `i`

    least: ClassVar[int] = 2
    variants: ClassVar[tuple[str, ...]] = ("ignore=0.98", "ignore=0.1")
    shares: ClassVar[dict[str, str]] = {"ignore": "a probability from 0 to 1"}
    trivial_reader: ClassVar[str] = "repeats the nearest bit"

    @property
    def symbols(self) -> tuple[str, ...]:
        return (SEPARATOR, "w", "r", "i", "0", "1")

    def size(self, length: int) -> int:
        return 2 * length

    def drawn(self, rng: np.random.Generator, length: int, count: int) -> Problems:
        chance = rng.random((count, length))
        write, reading, zero = 1, 2, 4  # ids
        instructions = write + (chance >= (1 - self.ignore) / 2) + (chance >= 1 - self.ignore)
        instructions[:, 0], instructions[:, -1] = write, reading
        bits = rng.integers(0, 2, (count, length))
        written = np.maximum.accumulate(np.where(instructions == write, np.arange(length), 0), axis=1)
        read = instructions == reading
        bits = np.where(read, np.take_along_axis(bits, written, axis=1), bits)
        ids = np.zeros((count, 1 + 2 * length), np.int64)
        ids[:, 1::2], ids[:, 2::2] = instructions, zero + bits
        scored = np.zeros((count, 2 * length), np.bool_)
        scored[:, 1::2] = read
        return Problems(ids, scored)

    def trivial(self, problems: Problems) -> Integers:
        return tokens_before(problems, 1)


@dataclasses.dataclass(frozen=True)
class Parity(Task):
    """Parity: is the number of ones odd? The negative control.

        length 4    reads   <|endoftext|>  1  0  1  1  =
                    scores                             1

    Length counts the bits, drawn independently and uniformly; the answer is their sum modulo 2. Without intermediate
    steps no encoding is known to make a transformer extrapolate here. If a result shows extrapolation, suspect an
    error.

    Source: Ruoss et al. (2023), arXiv:2305.16843, and Kazemnejad et al. (2023), arXiv:2305.19466, in both of which
    accuracy on longer strings is near chance, one half, with every encoding.
    Deviates: trained at lengths 2 to 16.
    """

    shortest: int = 2
    longest: int = 16

    trivial_reader: ClassVar[str] = "repeats the last bit"

    @property
    def symbols(self) -> tuple[str, ...]:
        return (SEPARATOR, ANSWER, "0", "1")

    def size(self, length: int) -> int:
        return length + 2

    def drawn(self, rng: np.random.Generator, length: int, count: int) -> Problems:
        bits = rng.integers(0, 2, (count, length))
        return answered(_DIGIT + bits, _DIGIT + bits.sum(axis=1, keepdims=True) % 2)

    def trivial(self, problems: Problems) -> Integers:
        return tokens_before(problems, 1)
