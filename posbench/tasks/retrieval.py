"""Tasks that ask for what stood somewhere in the text: induction, passkey, recall."""

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
    commonest_left,
    ending,
    numbered,
    without_replacement,
)


@dataclasses.dataclass(frozen=True)
class Induction(Task):
    """Induction head: which symbol followed the trigger the first time?

        length 5    reads   <|endoftext|>  s7  s2  !  s9  s2  !
                    scores                                    s9

    Length counts the symbols before the question, including the trigger. The trigger occurs once, at a uniformly drawn
    place other than the last. All other symbols are drawn independently and uniformly from `vocabulary` ones.

    Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (2023), arXiv:2312.00752,
    induction heads: 16 symbols, trained at length 256 and tested up to 2^20.
    Deviates: trained at lengths 4 to 32.
    """

    shortest: int = 4
    longest: int = 32
    vocabulary: int = 16  # number of symbols, without the trigger

    least: ClassVar[int] = 2
    numbers: ClassVar[dict[str, int]] = {"vocabulary": 2}
    trivial_reader: ClassVar[str] = "says the commonest symbol"

    @property
    def symbols(self) -> tuple[str, ...]:
        return (SEPARATOR, "!", *numbered("s", self.vocabulary))

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


@dataclasses.dataclass(frozen=True)
class Passkey(Task):
    """Passkey: find a number among meaningless filler and repeat it at the end.

        length 5    reads   <|endoftext|>  f3  f0  key  4  0  7  f3  f9  f1  =  4  0
                    scores                                                   4  0  7

    Length counts the fillers. The key (`digits` digits, drawn independently and uniformly) stands after a uniformly
    drawn number of them, from none to all, or at a `depth` from 0 (the beginning) to 1 (right before the question).
    Fillers are drawn independently and uniformly from separate symbols, so no filler looks like a key.

    Source: Mohtashami and Jaggi, "Landmark Attention: Random-Access Infinite Context Length for Transformers" (2023),
    arXiv:2305.16300, who ask a language model for a number that is hidden in repeated sentences.
    Deviates: small models are trained on it, so key, filler and question are single tokens, the fillers are random
    instead of one text repeated, and the key occurs once, not twice.
    """

    shortest: int = 4
    longest: int = 32
    digits: int = 3  # length of the key
    fillers: int = 16  # number of filler symbols
    depth: float | None = None  # place of the key among the fillers, from 0 to 1; null = uniformly drawn

    numbers: ClassVar[dict[str, int]] = {"digits": 1, "fillers": 1}
    variants: ClassVar[tuple[str, ...]] = ("depth=0.0", "depth=0.25", "depth=0.5", "depth=0.75", "depth=1.0")
    shares: ClassVar[dict[str, str]] = {"depth": "a number from 0 to 1, or null"}

    @property
    def symbols(self) -> tuple[str, ...]:
        return (SEPARATOR, ANSWER, "key", *map(str, range(10)), *numbered("f", self.fillers))

    def size(self, length: int) -> int:
        return length + 2 * self.digits + 2

    def drawn(self, rng: np.random.Generator, length: int, count: int) -> Problems:
        mark, zero, filler = 2, 3, 13  # ids
        key = rng.integers(zero, zero + 10, (count, self.digits))
        text = rng.integers(filler, filler + self.fillers, (count, length + 1 + self.digits))
        drawn = rng.integers(0, length + 1, (count, 1))
        before = drawn if self.depth is None else np.full((count, 1), round(self.depth * length))
        places = before + np.arange(1 + self.digits)
        np.put_along_axis(text, places, np.concatenate([np.full((count, 1), mark), key], axis=1), axis=1)
        return answered(text, key)


@dataclasses.dataclass(frozen=True)
class Recall(Task):
    """Multi-query associative recall (MQAR): which value belongs to this key? Every key is queried once.

        length 2, slots=3  reads   <|endoftext|> k4 v1 k0 v7 k0 v7 f2 f5 f1 f1 k4 v1 f0 f3 f3
                           scores                            v7                v1

    Length counts the pairs of a key and a value; keys are drawn without replacement, and so are values. After the pairs
    come `slots` places of two tokens per pair. Every key returns in one of them, followed by its value; the rest is
    filler. The pairs draw their places one after another and without replacement, place s = 1, 2, ... with a
    probability proportional to s^(power - 1): as in text, most keys return soon. Keys, values and fillers have separate
    symbols.

    Source: Arora et al., "Zoology: Measuring and Improving Recall in Efficient Language Models" (2023),
    arXiv:2312.04927, with its authors' generator.
    Deviates: that generator draws fillers from all symbols, also keys and values, so that some look like queries. Here
    the value follows the queried key in the text; there the text has filler and only the labels have the value. 64 keys
    and 64 values instead of 4,096 each.
    """

    shortest: int = 2
    longest: int = 8
    keys: int = 64  # number of keys, at least `longest`
    values: int = 64  # number of values, at least `longest`
    fillers: int = 16  # number of filler symbols
    slots: int = 2  # places of two tokens after the pairs, per pair
    power: float = 0.01  # how evenly the queries are spread; 1 = uniformly

    numbers: ClassVar[dict[str, int]] = {"keys": 1, "values": 1, "fillers": 1, "slots": 1}
    trivial_reader: ClassVar[str] = "says the value of the first pair that was not asked yet"

    def __post_init__(self) -> None:
        self.expect(0 < self.power <= 1, "power", "a number above 0, at most 1")
        super().__post_init__()

    @property
    def limit(self) -> int:
        return min(self.keys, self.values)

    @property
    def symbols(self) -> tuple[str, ...]:
        return (SEPARATOR, *numbered("k", self.keys), *numbered("v", self.values), *numbered("f", self.fillers))

    def size(self, length: int) -> int:
        return 2 * length * (1 + self.slots)

    def drawn(self, rng: np.random.Generator, length: int, count: int) -> Problems:
        keys = 1 + without_replacement(rng, self.keys, length, count)
        values = 1 + self.keys + without_replacement(rng, self.values, length, count)
        filler = 1 + self.keys + self.values
        ids = rng.integers(filler, filler + self.fillers, (count, 1 + self.size(length)))
        ids[:, 0] = 0
        ids[:, 1 : 2 * length + 1 : 2] = keys
        ids[:, 2 : 2 * length + 2 : 2] = values
        # Exponential arrival times with these rates give a draw without replacement: their order.
        rates = np.arange(1, self.slots * length + 1) ** (self.power - 1)
        arrivals = rng.exponential(size=(count, self.slots * length)) / rates
        asked = 1 + 2 * length + 2 * arrivals.argsort(axis=1)[:, :length]
        np.put_along_axis(ids, asked, keys, axis=1)
        np.put_along_axis(ids, asked + 1, values, axis=1)
        scored = np.zeros((count, self.size(length)), np.bool_)
        np.put_along_axis(scored, asked, True, axis=1)
        return Problems(ids, scored)

    def trivial(self, problems: Problems) -> Integers:
        labels, pairs = problems.ids[:, 1:], problems.scored.shape[1] // (2 * (1 + self.slots))
        values = problems.ids[:, 2 : 2 * pairs + 2 : 2]
        rows, left, guesses = np.arange(len(values)), np.ones(values.shape, np.bool_), np.zeros_like(labels)
        for t in range(2 * pairs, labels.shape[1]):
            guesses[:, t] = values[rows, left.argmax(axis=1)]
            left &= values != labels[:, t, None]  # the other tokens after the pairs are no values
        return guesses
