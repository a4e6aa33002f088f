"""Induction head: which symbol followed the trigger the first time?

    length 5    reads   <|endoftext|>  s7  s2  !  s9  s2  !
                scores                                    s9

Length counts the symbols before the question, including the trigger. The trigger occurs once, at a uniformly drawn
place other than the last. All other symbols are drawn independently and uniformly from `vocabulary` ones.

Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (2023), arXiv:2312.00752,
induction heads: 16 symbols, trained at length 256 and tested up to 2^20.
Deviates: trained at lengths 4 to 32.
"""

import dataclasses
from typing import ClassVar

import numpy as np

from posbench.tasks._readers import commonest_left
from posbench.tasks.base import SEPARATOR, Integers, Problems, Task, ending


@dataclasses.dataclass(frozen=True)
class Induction(Task):
    shortest: int = 4
    longest: int = 32
    vocabulary: int = 16  # number of symbols, without the trigger

    least: ClassVar[int] = 2
    numbers: ClassVar[dict[str, int]] = {"vocabulary": 2}
    trivial_reader: ClassVar[str] = "says the commonest symbol"

    @property
    def symbols(self) -> tuple[str, ...]:
        return (SEPARATOR, "!", *(f"s{number}" for number in range(self.vocabulary)))

    def size(self, length: int) -> int:
        return length + 2

    def drawn(self, rng: np.random.Generator, length: int, count: int) -> Problems:
        row = np.arange(count)
        ids = rng.integers(2, 2 + self.vocabulary, (count, length + 3))
        place = 1 + rng.integers(0, length - 1, count)
        ids[:, 0] = 0
        ids[row, place] = ids[:, -2] = 1
        ids[:, -1] = ids[row, place + 1]
        return ending(ids, 1)

    def trivial(self, problems: Problems) -> Integers:
        text = problems.ids[:, 1:-2]
        return commonest_left(problems, np.where(text > 1, text, 0))
