"""Selective copy: repeat the few tokens among blanks, in their order.

    length 4, tokens=3    reads   <|endoftext|>  .  s7  .  .  s2  s2  .  =   s7  s2
                          scores                                         s7  s2  s2

Length counts the blanks; `tokens` tokens stand at random places among them, drawn independently and uniformly from
`vocabulary` ones. Their distances are random, so no fixed distance leads to them.

Source: Gu and Dao, "Mamba" (2023), arXiv:2312.00752, selective copying: 16 tokens of 16 symbols in 4,096.
Deviates: 8 tokens among 8 to 32 blanks; the model reads each token of the answer before it predicts the next.
"""

import dataclasses
from typing import ClassVar

import numpy as np

from posbench.tasks._readers import LEFT_OVER, commonest_left
from posbench.tasks.base import ANSWER, SEPARATOR, Integers, Problems, Task, answered, without_replacement

_BLANK, _SYMBOL = 2, 3  # ids


@dataclasses.dataclass(frozen=True)
class SelectiveCopy(Task):
    shortest: int = 8
    longest: int = 32
    tokens: int = 8  # number of tokens among the blanks
    vocabulary: int = 16  # number of symbols, without the blank

    numbers: ClassVar[dict[str, int]] = {"tokens": 1, "vocabulary": 2}
    trivial_reader: ClassVar[str] = LEFT_OVER

    @property
    def symbols(self) -> tuple[str, ...]:
        return (SEPARATOR, ANSWER, ".", *(f"s{number}" for number in range(self.vocabulary)))

    def size(self, length: int) -> int:
        return length + 2 * self.tokens + 1

    def drawn(self, rng: np.random.Generator, length: int, count: int) -> Problems:
        answer = rng.integers(_SYMBOL, _SYMBOL + self.vocabulary, (count, self.tokens))
        text = np.full((count, length + self.tokens), _BLANK)
        places = np.sort(without_replacement(rng, length + self.tokens, self.tokens, count), axis=1)
        np.put_along_axis(text, places, answer, axis=1)
        return answered(text, answer)

    def trivial(self, problems: Problems) -> Integers:
        text = problems.ids[:, 1 : -self.tokens - 1]
        return commonest_left(problems, np.where(text >= _SYMBOL, text, 0))
