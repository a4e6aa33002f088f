"""Flip-flop: a memory of one bit that is written, ignored and read.

    length 5    reads   <|endoftext|>  w  1  i  0  r  1  w  0  r
                scores                             1           0

Length counts the pairs of an instruction and a bit. The first is a write (w) and the last a read (r); those between are
ignored (i) with probability `ignore`; otherwise they are writes or reads with equal chances. The bit after a read is
the one written last. Only these bits are scored; the other bits are drawn independently and uniformly.

Source: Liu et al., "Exposing Attention Glitches with Flip-Flop Language Modeling" (2023), arXiv:2306.00946: trained at
`ignore` 0.8 with 256 pairs, tested also at 0.98 (sparse: the last write is far away) and at 0.1 (dense: many writes
distract).
Deviates: trained at 4 to 32 pairs.
"""

import dataclasses
from typing import ClassVar

import numpy as np

from posbench.tasks._readers import tokens_before
from posbench.tasks.base import SEPARATOR, Integers, Problems, Task

_WRITE, _READ, _ZERO = 1, 2, 4  # ids


@dataclasses.dataclass(frozen=True)
class FlipFlop(Task):
    shortest: int = 4
    longest: int = 32
    ignore: float = 0.8  # probability that an instruction is `i`

    least: ClassVar[int] = 2
    variants: ClassVar[tuple[str, ...]] = ("ignore=0.98", "ignore=0.1")
    trivial_reader: ClassVar[str] = "repeats the nearest bit"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.expect(0 <= self.ignore <= 1, "ignore", "a probability from 0 to 1")

    @property
    def symbols(self) -> tuple[str, ...]:
        return (SEPARATOR, "w", "r", "i", "0", "1")

    def size(self, length: int) -> int:
        return 2 * length

    def drawn(self, rng: np.random.Generator, length: int, count: int) -> Problems:
        chance = rng.random((count, length))
        instructions = _WRITE + (chance >= (1 - self.ignore) / 2) + (chance >= 1 - self.ignore)
        instructions[:, 0], instructions[:, -1] = _WRITE, _READ
        bits = rng.integers(0, 2, (count, length))
        written = np.maximum.accumulate(np.where(instructions == _WRITE, np.arange(length), 0), axis=1)
        read = instructions == _READ
        bits = np.where(read, np.take_along_axis(bits, written, axis=1), bits)
        ids = np.zeros((count, 1 + 2 * length), np.int64)
        ids[:, 1::2], ids[:, 2::2] = instructions, _ZERO + bits
        scored = np.zeros((count, 2 * length), np.bool_)
        scored[:, 1::2] = read
        return Problems(ids, scored)

    def trivial(self, problems: Problems) -> Integers:
        return tokens_before(problems, 1)
