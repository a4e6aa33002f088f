"""Tasks whose answer is a string that was read, in the same order or in another one."""

import dataclasses
from typing import ClassVar

import numpy as np

from posbench.options import Count
from posbench.tasks.base import Choices, Integers, Problems, Task, distinct


@dataclasses.dataclass(frozen=True)
class Copy(Task):
    """Copy: repeat the string.

        length 4    reads   <|endoftext|>  s7  s2  s2  s9  =   s7  s2  s2  s9
                    scores                                 s7  s2  s2  s9  <|endoftext|>

    Length counts the symbols, drawn independently and uniformly. When to stop is part
    of the task.
    Source: Kazemnejad et al. (2023), arXiv:2305.19466: trained up to 20 symbols, tested
    up to 40.
    Deviates: the shortest trained string has 8 symbols, since short ones teach little.
    """

    shortest: int = 8
    longest: int = 20
    vocabulary: Choices = 32  # number of symbols
    kinds: ClassVar[dict[str, str]] = {"s": "vocabulary"}

    def size(self, length: int) -> int:
        return 2 * length + 2

    def drawn(self, rng: np.random.Generator, length: int, count: int) -> Problems:
        string = rng.integers(2, 2 + self.vocabulary, (count, length))
        return Problems.answered(string, self.answer(string), end=True)

    def answer(self, string: Integers) -> Integers:
        return string


@dataclasses.dataclass(frozen=True)
class Reverse(Copy):
    """Reverse: repeat the string from its end to its beginning. Otherwise it is `copy`.

        length 4    reads   <|endoftext|>  s7  s2  s2  s9  =   s9  s2  s2  s7
                    scores                                 s9  s2  s2  s7  <|endoftext|>
    Source: Ruoss et al. (2023), arXiv:2305.16843, and Kazemnejad et al. (2023),
    arXiv:2305.19466, which both use it.
    Deviates: 32 symbols and lengths 4 to 16, for models of 100,000 parameters.
    """

    shortest: int = 4
    longest: int = 16

    def answer(self, string: Integers) -> Integers:
        return string[:, ::-1]


@dataclasses.dataclass(frozen=True)
class Sort(Copy):
    """Sort: repeat the symbols of the string in sorted order, with repetitions; s0 is
    the least. Otherwise `copy`.

        length 4    reads   <|endoftext|>  s7  s2  s9  s2  =   s2  s2  s7  s9
                    scores                                 s2  s2  s7  s9  <|endoftext|>
    Source: Kazemnejad et al. (2023), arXiv:2305.19466; with five symbols Ruoss et al.
    (2023), arXiv:2305.16843.
    Deviates: 32 symbols and lengths 4 to 12, for models of 100,000 parameters.
    """

    shortest: int = 4
    longest: int = 12

    def answer(self, string: Integers) -> Integers:
        return np.sort(string, axis=1)

    def trivial(self, problems: Problems) -> Integers:
        return problems.before(0)


@dataclasses.dataclass(frozen=True)
class Repeat(Copy):
    """Repeat: copy without a separator between a random string and its copy.

        length 4    reads   <|endoftext|>  s7  s2  s2  s9  s7  s2  s2
                    scores                                 s2  s2  s9

    Length counts the symbols of the string. Its first symbol occurs only once in it.
    Its return is the only sign that the string is over, and cannot be predicted. The
    others are drawn independently and uniformly from the rest.
    Source: Olsson et al. (2022), arXiv:2209.11895; Ruoss et al. (2023),
    arXiv:2305.16843 (duplicating a string).
    Deviates: strings of varying length; the first symbol does not recur, so that all
    scored ones can be predicted.
    """

    least: ClassVar[int] = 2
    words: ClassVar[str] = ""

    def size(self, length: int) -> int:
        return 2 * length

    def drawn(self, rng: np.random.Generator, length: int, count: int) -> Problems:
        first = rng.integers(0, self.vocabulary, (count, 1))
        steps = rng.integers(1, self.vocabulary, (count, length - 1))
        others = (first + steps) % self.vocabulary  # none is the first
        string = 1 + np.concatenate([first, others], axis=1)
        separator = np.zeros_like(first)
        ids = np.concatenate([separator, string, string], axis=1)
        return Problems.ending(ids, length - 1)


@dataclasses.dataclass(frozen=True)
class SelectiveCopy(Task):
    """Selective copy: repeat the few tokens that stand at random places among blanks,
    in their order.

        length 4, tokens=3    reads   <|endoftext|>  .  s7  .  .  s2  s2  .  =   s7  s2
                              scores                                         s7  s2  s2

    Length counts the blanks. The tokens are drawn independently and uniformly; no fixed
    distance leads to them.
    Source: Gu and Dao, "Mamba" (2023), arXiv:2312.00752, selective copying: 16 tokens
    of 16 symbols in 4,096.
    Deviates: 8 tokens among 8 to 32 blanks; the model reads each token of the answer
    before it predicts the next.
    """

    shortest: int = 8
    longest: int = 32
    tokens: Count = 8  # number of tokens among the blanks
    vocabulary: Choices = 16  # number of symbols, without the blank
    words: ClassVar[str] = "= ."
    kinds: ClassVar[dict[str, str]] = {"s": "vocabulary"}

    def size(self, length: int) -> int:
        return length + 2 * self.tokens + 1

    def drawn(self, rng: np.random.Generator, length: int, count: int) -> Problems:
        blank, symbol = 2, 3  # ids
        answer = rng.integers(symbol, symbol + self.vocabulary, (count, self.tokens))
        size = length + self.tokens
        text = np.full((count, size), blank)
        places = np.sort(distinct(rng, size, self.tokens, count), axis=1)
        np.put_along_axis(text, places, answer, axis=1)
        return Problems.answered(text, answer)
