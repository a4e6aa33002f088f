"""Tasks that ask for what stood somewhere in the text: induction, passkey, recall."""

import dataclasses
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Gt, Le

from posbench.options import Count, Fraction
from posbench.tasks.base import Choices, Integers, Problems, Task, distinct


@dataclasses.dataclass(frozen=True)
class Induction(Task):
    """Induction head: which symbol followed the trigger the first time?

        length 5    reads   <|endoftext|>  s7  s2  !  s9  s2  !
                    scores                                    s9

    Length counts the symbols before the question. One is the trigger, at a uniformly
    drawn place other than the last.
    Source: Gu and Dao (2023), arXiv:2312.00752: 16 symbols, trained at length 256 and
    tested up to 2^20.
    Deviates: trained at lengths 4 to 32.
    """

    shortest: int = 4
    longest: int = 32
    vocabulary: Choices = 16  # number of symbols, without the trigger
    least: ClassVar[int] = 2
    words: ClassVar[str] = "!"
    kinds: ClassVar[dict[str, str]] = {"s": "vocabulary"}

    def drawn(self, rng: np.random.Generator, length: int, count: int) -> Problems:
        trigger, symbol = 1, 2  # ids
        ids = rng.integers(symbol, symbol + self.vocabulary, (count, length + 3))
        place = 1 + rng.integers(0, length - 1, count)
        row = np.arange(count)
        ids[:, 0] = 0
        ids[row, place] = trigger
        ids[:, -2] = trigger
        ids[:, -1] = ids[row, place + 1]
        return Problems.ending(ids, 1)

    def trivial(self, problems: Problems) -> Integers:
        text = problems.ids[:, 1:-2]
        return problems.commonest_left(np.where(text > 1, text, 0))


@dataclasses.dataclass(frozen=True)
class Passkey(Task):
    """Passkey: find a number among meaningless filler and repeat it at the end.

        length 5    reads   <|endoftext|>  f3  f0  key  4  0  7  f3  f9  f1  =  4  0
                    scores                                                   4  0  7

    Length counts the fillers. The key stands after a uniformly drawn number of them,
    from none to all, or at a `depth`.
    Source: Mohtashami and Jaggi (2023), arXiv:2305.16300, who hide a number in repeated
    sentences, as text.
    Deviates: key mark, fillers and question are single tokens, fillers are random, and
    the key occurs once, not twice.
    """

    shortest: int = 4
    longest: int = 32
    digits: Count = 3  # length of the key
    fillers: Count = 16  # number of filler symbols
    # place of the key among the fillers, from 0 to 1; null = uniformly drawn
    depth: Fraction | None = None
    words: ClassVar[str] = "= key 0 1 2 3 4 5 6 7 8 9"
    kinds: ClassVar[dict[str, str]] = {"f": "fillers"}
    variations: ClassVar[tuple[str, ...]] = (
        "depth=0.0",
        "depth=0.25",
        "depth=0.5",
        "depth=0.75",
        "depth=1.0",
    )

    def size(self, length: int) -> int:
        return length + 2 * self.digits + 2

    def drawn(self, rng: np.random.Generator, length: int, count: int) -> Problems:
        mark, zero, filler = 2, 3, 13  # ids
        key = rng.integers(zero, zero + 10, (count, self.digits))
        size = length + 1 + self.digits
        text = rng.integers(filler, filler + self.fillers, (count, size))
        start = rng.integers(0, length + 1, (count, 1))
        if self.depth is not None:
            start[:] = round(self.depth * length)
        places = start + np.arange(1 + self.digits)
        np.put_along_axis(text, places[:, :1], mark, axis=1)
        np.put_along_axis(text, places[:, 1:], key, axis=1)
        return Problems.answered(text, key)


@dataclasses.dataclass(frozen=True)
class Recall(Task):
    """Multi-query associative recall (MQAR): which value belongs to this key? Every key
    is queried once.

        length 2, slots=3
        reads    <|endoftext|> k4 v1 k0 v7 k0 v7 f2 f5 f1 f1 k4 v1 f0 f3 f3
        scores                             v7                v1

    Length counts the pairs of a key and a value, both drawn without replacement. After
    them come `slots` places of two tokens per pair. Every key returns in one of them
    with its value, and the rest is filler. The pairs draw free places in turn: place s
    = 1, 2, ... with a probability proportional to s^(power - 1).
    Source: Arora et al. (2023), arXiv:2312.04927 (Zoology), with its authors'
    generator.
    Deviates: no filler looks like a query; values follow queried keys in the text, too;
    64 keys and values, not 4,096.
    """

    shortest: int = 2
    longest: int = 8
    keys: int = 64  # number of keys, at least `longest`
    values: int = 64  # number of values, at least `longest`
    fillers: Count = 16  # number of filler symbols
    slots: Count = 2  # places of two tokens after the pairs, per pair
    # how evenly the queries are spread; 1 = uniformly
    power: Annotated[float, Gt(0), Le(1)] = 0.01
    words: ClassVar[str] = ""
    kinds: ClassVar[dict[str, str]] = {"k": "keys", "v": "values", "f": "fillers"}

    @property
    def limit(self) -> int:
        return min(self.keys, self.values)

    def size(self, length: int) -> int:
        return 2 * length * (1 + self.slots)

    def drawn(self, rng: np.random.Generator, length: int, count: int) -> Problems:
        key = 1  # ids
        value = key + self.keys
        filler = value + self.values
        size = self.size(length)
        keys = key + distinct(rng, self.keys, length, count)
        values = value + distinct(rng, self.values, length, count)
        ids = rng.integers(filler, filler + self.fillers, (count, 1 + size))

        # the pairs
        queries = 1 + 2 * length  # where they begin
        ids[:, 0] = 0
        ids[:, 1:queries:2] = keys
        ids[:, 2:queries:2] = values

        # The order of exponential arrival times with these rates is a draw without
        # replacement.
        n_slots = self.slots * length
        rates = np.arange(1, n_slots + 1) ** (self.power - 1)
        arrivals = rng.exponential(size=(count, n_slots)) / rates
        slots = arrivals.argsort(axis=1)[:, :length]
        places = queries + 2 * slots
        np.put_along_axis(ids, places, keys, axis=1)
        np.put_along_axis(ids, places + 1, values, axis=1)
        scored = np.zeros((count, size), np.bool_)
        np.put_along_axis(scored, places, True, axis=1)
        return Problems(ids, scored)

    def trivial(self, problems: Problems) -> Integers:
        """Guess the value of the first pair that has not been queried."""
        labels = problems.ids[:, 1:]
        n_pairs = labels.shape[1] // (2 * (1 + self.slots))
        values = problems.ids[:, 2 : 2 * n_pairs + 2 : 2]

        rows = np.arange(len(values))
        is_unused = np.ones(values.shape, np.bool_)
        guesses = np.zeros_like(labels)
        for t in range(2 * n_pairs, labels.shape[1]):
            guesses[:, t] = values[rows, is_unused.argmax(axis=1)]
            # the other tokens after the pairs are no values
            is_unused &= values != labels[:, t, None]
        return guesses
