"""Counting: how many x since the last reset?

    length 6    reads   <|endoftext|>  x  .  reset  x  x  .  =
                scores                                       2

Length counts the tokens before the question. Each is a reset with probability `reset`, otherwise an x or a dot with
equal chances. The answer is the number of x after the last reset (all x if there is none). It is one token.

Source: after the counting task of Golovneva et al., "Contextual Position Encoding: Learning to Count What's Important"
(2024), arXiv:2405.18719, whose variables are assigned and incremented.
Deviates: a single variable, which is only ever set to zero, and one token an instruction. Resets keep counts small at
any length: at 192 tokens one problem in 150 has a count above 24, which training never shows.
"""

import dataclasses
from typing import ClassVar

import numpy as np

from posbench.tasks.base import ANSWER, SEPARATOR, Integers, Problems, Task, answered

_COUNTS, _DOT, _RESET, _NONE = 2, 3, 4, 5  # ids; the counts 0, 1 ... begin at _NONE


@dataclasses.dataclass(frozen=True)
class Counting(Task):
    shortest: int = 4
    longest: int = 24
    reset: float = 0.1  # probability of a reset
    highest: int = 192  # the highest count with a token, and the longest problem

    numbers: ClassVar[dict[str, int]] = {"highest": 1}
    trivial_reader: ClassVar[str] = "always says 0"

    def __post_init__(self) -> None:
        self.expect(0 <= self.reset <= 1, "reset", "a probability from 0 to 1")
        super().__post_init__()

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
        text = _COUNTS + (chance >= (1 - self.reset) / 2) + (chance >= 1 - self.reset)
        last = np.max(np.where(text == _RESET, np.arange(length), -1), axis=1, keepdims=True)
        counts = ((text == _COUNTS) & (np.arange(length) > last)).sum(axis=1, keepdims=True)
        return answered(text, _NONE + counts)

    def trivial(self, problems: Problems) -> Integers:
        return np.full(problems.scored.shape, _NONE)
