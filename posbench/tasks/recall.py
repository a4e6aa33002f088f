"""Multi-query associative recall (MQAR): which value belongs to this key? Asked of every key, one after another.

    length 2, slots=3  reads   <|endoftext|> k4 v1 k0 v7 k0 v7 f2 f5 f1 f1 k4 v1 f0 f3 f3
                       scores                            v7                v1

Length counts the pairs of a key and a value; keys are drawn without replacement, and so are values. Behind the pairs
stand `slots` places of two tokens for each of them, in which every key is asked once and its value follows; the rest is
filler. The pairs draw their slots one after another and without replacement, slot s = 1, 2, ... with a probability in
proportion to s^(power - 1): as in text, what comes back mostly does so soon. Keys, values and fillers are symbols of
their own.

Source: Arora et al., "Zoology: Measuring and Improving Recall in Efficient Language Models" (2023), arXiv:2312.04927,
with its authors' generator.
Deviates: that generator draws fillers from all symbols, keys and values included, so that some look like questions;
the value stands behind the key that asked for it, where there filler stands in the text and the value only in the
labels; 64 keys and 64 values in place of 4,096 each.
"""

import dataclasses

import numpy as np

from posbench.tasks.base import SEPARATOR, Problems, Task, without_replacement


@dataclasses.dataclass(frozen=True)
class Recall(Task):
    shortest: int = 2
    longest: int = 8
    keys: int = 64  # different keys, at least as many as the longest problem has pairs
    values: int = 64  # different values, likewise
    fillers: int = 16  # different fillers
    slots: int = 2  # places of two tokens behind the pairs, for each of them
    power: float = 0.01  # how evenly the questions are spread; 1 = uniformly

    def __post_init__(self) -> None:
        for option in ("keys", "values", "fillers", "slots"):
            self.expect_number(option, 1)
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
        # The order of arrival of a race whose rates are the probabilities is a draw without replacement.
        rates = np.arange(1, self.slots * length + 1) ** (self.power - 1)
        arrivals = rng.exponential(size=(count, self.slots * length)) / rates
        asked = 1 + 2 * length + 2 * arrivals.argsort(axis=1)[:, :length]
        np.put_along_axis(ids, asked, keys, axis=1)
        np.put_along_axis(ids, asked + 1, values, axis=1)
        scored = np.zeros((count, self.size(length)), np.bool_)
        np.put_along_axis(scored, asked, True, axis=1)
        return Problems(ids, scored)
