"""Passkey: find a number among meaningless filler and repeat it at the end.

    length 5    reads   <|endoftext|>  f3  f0  key  4  0  7  f3  f9  f1  =  4  0
                scores                                                   4  0  7

Length counts the fillers. The key (`digits` digits, drawn independently and uniformly) stands after a uniformly drawn
number of them, from none to all, or at a `depth` from 0 (the beginning) to 1 (right before the question). Fillers are
drawn independently and uniformly from separate symbols, so no filler looks like a key.

Source: Mohtashami and Jaggi, "Landmark Attention: Random-Access Infinite Context Length for Transformers" (2023),
arXiv:2305.16300, who ask a language model for a number that is hidden in repeated sentences.
Deviates: small models are trained on it, so key, filler and question are single tokens, the fillers are random instead
of one text repeated, and the key occurs once, not twice.
"""

import dataclasses
from typing import ClassVar

import numpy as np

from posbench.tasks._readers import LEFT_OVER, commonest_left
from posbench.tasks.base import ANSWER, SEPARATOR, Integers, Problems, Task, answered

_KEY, _ZERO, _FILLER = 2, 3, 13  # ids


@dataclasses.dataclass(frozen=True)
class Passkey(Task):
    shortest: int = 4
    longest: int = 32
    digits: int = 3  # length of the key
    fillers: int = 16  # number of filler symbols
    depth: float | None = None  # place of the key among the fillers, from 0 to 1; null = uniformly drawn

    numbers: ClassVar[dict[str, int]] = {"digits": 1, "fillers": 1}
    variants: ClassVar[tuple[str, ...]] = ("depth=0.0", "depth=0.25", "depth=0.5", "depth=0.75", "depth=1.0")
    trivial_reader: ClassVar[str] = LEFT_OVER

    def __post_init__(self) -> None:
        super().__post_init__()
        self.expect(self.depth is None or 0 <= self.depth <= 1, "depth", "a number from 0 to 1, or null")

    @property
    def symbols(self) -> tuple[str, ...]:
        fillers = (f"f{number}" for number in range(self.fillers))
        return (SEPARATOR, ANSWER, "key", *map(str, range(10)), *fillers)

    def size(self, length: int) -> int:
        return length + 2 * self.digits + 2

    def drawn(self, rng: np.random.Generator, length: int, count: int) -> Problems:
        key = rng.integers(_ZERO, _ZERO + 10, (count, self.digits))
        text = rng.integers(_FILLER, _FILLER + self.fillers, (count, length + 1 + self.digits))
        drawn = rng.integers(0, length + 1, (count, 1))
        before = drawn if self.depth is None else np.full((count, 1), round(self.depth * length))
        places = before + np.arange(1 + self.digits)
        np.put_along_axis(text, places, np.concatenate([np.full((count, 1), _KEY), key], axis=1), axis=1)
        return answered(text, key)

    def trivial(self, problems: Problems) -> Integers:
        text = problems.ids[:, 1 : -self.digits - 1]
        return commonest_left(problems, np.where((text >= _ZERO) & (text < _FILLER), text, 0))
