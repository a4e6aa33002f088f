"""Sort: repeat the symbols of the string in sorted order, with repetitions.

    length 4    reads   <|endoftext|>  s7  s2  s9  s2  =   s2  s2  s7  s9
                scores                                 s2  s2  s7  s9  <|endoftext|>

Length counts the symbols of the string, drawn independently and uniformly from `vocabulary` ones; s0 is the least. The
end of the answer is scored too.

Source: Kazemnejad et al. (2023), arXiv:2305.19466, sorting of single tokens; Ruoss et al. (2023), arXiv:2305.16843,
with five symbols (bucket sort).
Deviates: 32 symbols and lengths 4 to 12, for models of 100,000 parameters.
"""

import dataclasses
from typing import ClassVar

import numpy as np

from posbench.tasks._readers import tokens_before
from posbench.tasks._strings import OfAString
from posbench.tasks.base import Integers, Problems


@dataclasses.dataclass(frozen=True)
class Sort(OfAString):
    shortest: int = 4
    longest: int = 12

    trivial_reader: ClassVar[str] = "repeats the last token"

    def answer(self, string: Integers) -> Integers:
        return np.sort(string, axis=1)

    def trivial(self, problems: Problems) -> Integers:
        return tokens_before(problems, 0)
