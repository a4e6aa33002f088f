"""Repeat: a random string twice, without a separator between the two.

    length 4    reads   <|endoftext|>  s7  s2  s2  s9  s7  s2  s2
                scores                                 s2  s2  s9

Length counts the symbols of the string. The first symbol of the second half cannot be predicted and is not scored. Its
return is the only sign that the string is over, so it occurs only once in the string. The others are drawn
independently and uniformly from the other symbols.

Source: Olsson et al., "In-context Learning and Induction Heads" (2022), arXiv:2209.11895, whose repeated random tokens
show which heads look back to the successor of the current token; Ruoss et al. (2023), arXiv:2305.16843, where it is
called duplicating a string.
Deviates: strings of varying length; the first symbol does not recur, so that every scored symbol can be known.
"""

import dataclasses
from typing import ClassVar

import numpy as np

from posbench.tasks._readers import LEFT_OVER, commonest_left
from posbench.tasks.base import SEPARATOR, Integers, Problems, Task, ending


@dataclasses.dataclass(frozen=True)
class Repeat(Task):
    shortest: int = 8
    longest: int = 20
    vocabulary: int = 32  # number of symbols

    least: ClassVar[int] = 2
    numbers: ClassVar[dict[str, int]] = {"vocabulary": 2}
    trivial_reader: ClassVar[str] = LEFT_OVER

    @property
    def symbols(self) -> tuple[str, ...]:
        return (SEPARATOR, *(f"s{number}" for number in range(self.vocabulary)))

    def size(self, length: int) -> int:
        return 2 * length

    def drawn(self, rng: np.random.Generator, length: int, count: int) -> Problems:
        first = rng.integers(0, self.vocabulary, (count, 1))
        others = (first + rng.integers(1, self.vocabulary, (count, length - 1))) % self.vocabulary
        string = 1 + np.concatenate([first, others], axis=1)
        return ending(np.concatenate([np.zeros_like(first), string, string], axis=1), length - 1)

    def trivial(self, problems: Problems) -> Integers:
        length = problems.scored.shape[1] // 2
        return commonest_left(problems, problems.ids[:, 2 : length + 1])
