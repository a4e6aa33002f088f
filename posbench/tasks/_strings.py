"""Shared by copy, reverse and sort: a string of symbols, answered by another string."""

import dataclasses
from typing import ClassVar

import numpy as np

from posbench.tasks._readers import LEFT_OVER, commonest_left
from posbench.tasks.base import ANSWER, SEPARATOR, Integers, Problems, Task, answered


@dataclasses.dataclass(frozen=True)
class OfAString(Task):
    vocabulary: int = 32  # number of symbols

    numbers: ClassVar[dict[str, int]] = {"vocabulary": 2}
    trivial_reader: ClassVar[str] = LEFT_OVER

    @property
    def symbols(self) -> tuple[str, ...]:
        return (SEPARATOR, ANSWER, *(f"s{number}" for number in range(self.vocabulary)))

    def size(self, length: int) -> int:
        return 2 * length + 2

    def drawn(self, rng: np.random.Generator, length: int, count: int) -> Problems:
        string = rng.integers(2, 2 + self.vocabulary, (count, length))
        return answered(string, self.answer(string), end=True)

    def trivial(self, problems: Problems) -> Integers:
        length = problems.ids.shape[1] // 2 - 1
        return commonest_left(problems, problems.ids[:, 1 : length + 1])

    def answer(self, string: Integers) -> Integers:
        """The answers to strings (count, length), of the same shape."""
        raise NotImplementedError
