"""Tasks whose answer is a string that was read, in its order or another one."""

import dataclasses
from typing import ClassVar

import numpy as np

from posbench.tasks.base import (
    ANSWER,
    SEPARATOR,
    Integers,
    Problems,
    Task,
    answered,
    ending,
    numbered,
    tokens_before,
    without_replacement,
)


@dataclasses.dataclass(frozen=True)
class _OfAString(Task):
    """A string of symbols, answered by another string and its end."""

    vocabulary: int = 32  # number of symbols

    numbers: ClassVar[dict[str, int]] = {"vocabulary": 2}

    @property
    def symbols(self) -> tuple[str, ...]:
        return (SEPARATOR, ANSWER, *numbered("s", self.vocabulary))

    def size(self, length: int) -> int:
        return 2 * length + 2

    def drawn(self, rng: np.random.Generator, length: int, count: int) -> Problems:
        string = rng.integers(2, 2 + self.vocabulary, (count, length))
        return answered(string, self.answer(string), end=True)

    def answer(self, string: Integers) -> Integers:
        """The answers to strings (count, length), of the same shape."""
        return string


@dataclasses.dataclass(frozen=True)
class Copy(_OfAString):
    """Copy: repeat the string.

        length 4    reads   <|endoftext|>  s7  s2  s2  s9  =   s7  s2  s2  s9
                    scores                                 s7  s2  s2  s9  <|endoftext|>

    Length counts the symbols of the string, drawn independently and uniformly from `vocabulary` ones. The end of the
    answer is scored too: when to stop is part of the task.

    Source: Kazemnejad et al., "The Impact of Positional Encoding on Length Generalization in Transformers" (2023),
    arXiv:2305.19466: trained up to 20 symbols, tested up to 40.
    Deviates: the shortest trained string has 8 symbols, since short ones teach little.
    """

    shortest: int = 8
    longest: int = 20


@dataclasses.dataclass(frozen=True)
class Reverse(_OfAString):
    """Reverse: repeat the string from its end to its beginning.

        length 4    reads   <|endoftext|>  s7  s2  s2  s9  =   s9  s2  s2  s7
                    scores                                 s9  s2  s2  s7  <|endoftext|>

    Length counts the symbols of the string, drawn independently and uniformly from `vocabulary` ones. The end of the
    answer is scored too.

    Source: Ruoss et al., "Randomized Positional Encodings Boost Length Generalization of Transformers" (2023),
    arXiv:2305.16843, and Kazemnejad et al. (2023), arXiv:2305.19466, which both use it.
    Deviates: 32 symbols and lengths 4 to 16, for models of 100,000 parameters.
    """

    shortest: int = 4
    longest: int = 16

    def answer(self, string: Integers) -> Integers:
        return string[:, ::-1]


@dataclasses.dataclass(frozen=True)
class Sort(_OfAString):
    """Sort: repeat the symbols of the string in sorted order, with repetitions.

        length 4    reads   <|endoftext|>  s7  s2  s9  s2  =   s2  s2  s7  s9
                    scores                                 s2  s2  s7  s9  <|endoftext|>

    Length counts the symbols of the string, drawn independently and uniformly from `vocabulary` ones; s0 is the least.
    The end of the answer is scored too.

    Source: Kazemnejad et al. (2023), arXiv:2305.19466, sorting of single tokens; Ruoss et al. (2023), arXiv:2305.16843,
    with five symbols (bucket sort).
    Deviates: 32 symbols and lengths 4 to 12, for models of 100,000 parameters.
    """

    shortest: int = 4
    longest: int = 12

    trivial_reader: ClassVar[str] = "repeats the last token"

    def answer(self, string: Integers) -> Integers:
        return np.sort(string, axis=1)

    def trivial(self, problems: Problems) -> Integers:
        return tokens_before(problems, 0)


@dataclasses.dataclass(frozen=True)
class Repeat(Task):
    """Repeat: a random string twice, without a separator between the two.

        length 4    reads   <|endoftext|>  s7  s2  s2  s9  s7  s2  s2
                    scores                                 s2  s2  s9

    Length counts the symbols of the string. The first symbol of the second half cannot be predicted and is not scored.
    Its return is the only sign that the string is over, so it occurs only once in the string. The others are drawn
    independently and uniformly from the other symbols.

    Source: Olsson et al., "In-context Learning and Induction Heads" (2022), arXiv:2209.11895, whose repeated random
    tokens show which heads look back to the successor of the current token; Ruoss et al. (2023), arXiv:2305.16843,
    where it is called duplicating a string.
    Deviates: strings of varying length; the first symbol does not recur, so that every scored symbol can be known.
    """

    shortest: int = 8
    longest: int = 20
    vocabulary: int = 32  # number of symbols

    least: ClassVar[int] = 2
    numbers: ClassVar[dict[str, int]] = {"vocabulary": 2}

    @property
    def symbols(self) -> tuple[str, ...]:
        return (SEPARATOR, *numbered("s", self.vocabulary))

    def size(self, length: int) -> int:
        return 2 * length

    def drawn(self, rng: np.random.Generator, length: int, count: int) -> Problems:
        first = rng.integers(0, self.vocabulary, (count, 1))
        others = (first + rng.integers(1, self.vocabulary, (count, length - 1))) % self.vocabulary
        string = 1 + np.concatenate([first, others], axis=1)
        return ending(np.concatenate([np.zeros_like(first), string, string], axis=1), length - 1)


@dataclasses.dataclass(frozen=True)
class SelectiveCopy(Task):
    """Selective copy: repeat the few tokens among blanks, in their order.

        length 4, tokens=3    reads   <|endoftext|>  .  s7  .  .  s2  s2  .  =   s7  s2
                              scores                                         s7  s2  s2

    Length counts the blanks; `tokens` tokens stand at random places among them, drawn independently and uniformly from
    `vocabulary` ones. Their distances are random, so no fixed distance leads to them.

    Source: Gu and Dao, "Mamba" (2023), arXiv:2312.00752, selective copying: 16 tokens of 16 symbols in 4,096.
    Deviates: 8 tokens among 8 to 32 blanks; the model reads each token of the answer before it predicts the next.
    """

    shortest: int = 8
    longest: int = 32
    tokens: int = 8  # number of tokens among the blanks
    vocabulary: int = 16  # number of symbols, without the blank

    numbers: ClassVar[dict[str, int]] = {"tokens": 1, "vocabulary": 2}

    @property
    def symbols(self) -> tuple[str, ...]:
        return (SEPARATOR, ANSWER, ".", *numbered("s", self.vocabulary))

    def size(self, length: int) -> int:
        return length + 2 * self.tokens + 1

    def drawn(self, rng: np.random.Generator, length: int, count: int) -> Problems:
        blank, symbol = 2, 3  # ids
        answer = rng.integers(symbol, symbol + self.vocabulary, (count, self.tokens))
        text = np.full((count, length + self.tokens), blank)
        places = np.sort(without_replacement(rng, length + self.tokens, self.tokens, count), axis=1)
        np.put_along_axis(text, places, answer, axis=1)
        return answered(text, answer)
