"""Multi-query associative recall (MQAR): which value belongs to this key? Every key is queried once.

    length 2, slots=3  reads   <|endoftext|> k4 v1 k0 v7 k0 v7 f2 f5 f1 f1 k4 v1 f0 f3 f3
                       scores                            v7                v1

Length counts the pairs of a key and a value; keys are drawn without replacement, and so are values. After the pairs
come `slots` places of two tokens per pair. Every key returns in one of them, followed by its value; the rest is filler.
The pairs draw their places one after another and without replacement, place s = 1, 2, ... with a probability
proportional to s^(power - 1): as in text, most keys return soon. Keys, values and fillers have separate symbols.

Source: Arora et al., "Zoology: Measuring and Improving Recall in Efficient Language Models" (2023), arXiv:2312.04927,
with its authors' generator.
Deviates: that generator draws fillers from all symbols, also keys and values, so that some look like queries. Here the
value follows the queried key in the text; there the text has filler and only the labels have the value. 64 keys and 64
values instead of 4,096 each.
"""

import dataclasses
from typing import ClassVar

import numpy as np

from posbench.tasks.base import SEPARATOR, Integers, Problems, Task, without_replacement


@dataclasses.dataclass(frozen=True)
class Recall(Task):
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
        numbers = {"k": self.keys, "v": self.values, "f": self.fillers}
        return (SEPARATOR, *(f"{kind}{number}" for kind, most in numbers.items() for number in range(most)))

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
