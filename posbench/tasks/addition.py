"""Addition of two numbers with the same number of digits, most significant first, with leading zeros.

    length 2         reads   <|endoftext|> 4 7 + 8 5 = 1 3 2
                     scores                          1 3 2 <|endoftext|>
    answer=reversed  reads   <|endoftext|> 4 7 + 8 5 = 2 3 1
                     scores                          2 3 1 <|endoftext|>
    hints=64         reads   <|endoftext|> h8 0 h9 4 h10 7 + h8 0 h9 8 h10 5 =  h8 1  h9 3   h10 2
                     scores                                                  h8 1  h9 3  h10 2   <|endoftext|>

Length counts the digits of each number, drawn independently and uniformly; the answer has one more. A reversed answer
follows the order of the carries. Index hints mark digits of the same place with the same hint. The hints of a problem
begin at a random one, so that all of them are trained. The end of the answer is scored too, and so are its hints.

Source: Kazemnejad et al. (2023), arXiv:2305.19466, for the task; Zhou et al., "What Algorithms can Transformers Learn?"
(2023), arXiv:2310.16028, for index hints and the reversed answer.
Deviates: both numbers have the same number of digits, so that problems of one length have one size; with hints both get
a leading zero, so that the question contains every hint of the answer.
"""

import dataclasses
from typing import ClassVar, Literal

import numpy as np

from posbench.tasks.base import ANSWER, SEPARATOR, Integers, Problems, Task, answered

_ZERO, _PLUS, _HINT = 2, 12, 13  # ids


@dataclasses.dataclass(frozen=True)
class Addition(Task):
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
        hints = (f"h{number}" for number in range(self.hints))
        return (SEPARATOR, ANSWER, *map(str, range(10)), "+", *hints)

    def size(self, length: int) -> int:
        return 6 * length + 9 if self.hints else 3 * length + 4

    def drawn(self, rng: np.random.Generator, length: int, count: int) -> Problems:
        terms = rng.integers(0, 10, (2, count, length))
        total = _sum(*terms)
        plus = np.full((count, 1), _PLUS)
        places: Integers | None = None  # the hints of the digits, the most significant first
        if self.hints:
            terms = np.pad(terms, ((0, 0), (0, 0), (1, 0)))
            places = _HINT + rng.integers(0, self.hints - length, (count, 1)) + np.arange(length + 1)
        order = slice(None, None, -1) if self.answer == "reversed" else slice(None)
        left, right = (_written(term, places) for term in terms)
        answer = _written(total[:, order], None if places is None else places[:, order])
        return answered(np.concatenate([left, plus, right], axis=1), answer, end=True)

    def trivial(self, problems: Problems) -> Integers:
        guesses = np.full(problems.scored.shape, _ZERO)
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
        return _ZERO + digits
    return np.stack([hints, _ZERO + digits], axis=2).reshape(len(digits), -1)
