"""Parity: is the number of ones odd? The negative control.

    length 4    reads   <|endoftext|>  1  0  1  1  =
                scores                             1

Length counts the bits, drawn independently and uniformly; the answer is their sum modulo 2. Without intermediate steps
no encoding is known to make a transformer extrapolate here. If a result shows extrapolation, suspect an error.

Source: Ruoss et al. (2023), arXiv:2305.16843, and Kazemnejad et al. (2023), arXiv:2305.19466, in both of which accuracy
on longer strings is near chance, one half, with every encoding.
Deviates: trained at lengths 2 to 16.
"""

import dataclasses
from typing import ClassVar

import numpy as np

from posbench.tasks._readers import tokens_before
from posbench.tasks.base import ANSWER, SEPARATOR, Integers, Problems, Task, answered

_ZERO = 2  # id


@dataclasses.dataclass(frozen=True)
class Parity(Task):
    shortest: int = 2
    longest: int = 16

    trivial_reader: ClassVar[str] = "repeats the last bit"

    @property
    def symbols(self) -> tuple[str, ...]:
        return (SEPARATOR, ANSWER, "0", "1")

    def size(self, length: int) -> int:
        return length + 2

    def drawn(self, rng: np.random.Generator, length: int, count: int) -> Problems:
        bits = rng.integers(0, 2, (count, length))
        return answered(_ZERO + bits, _ZERO + bits.sum(axis=1, keepdims=True) % 2)

    def trivial(self, problems: Problems) -> Integers:
        return tokens_before(problems, 1)
