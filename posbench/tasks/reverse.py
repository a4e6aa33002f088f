"""Reverse: repeat the string from its end to its beginning.

    length 4    reads   <|endoftext|>  s7  s2  s2  s9  =   s9  s2  s2  s7
                scores                                 s9  s2  s2  s7  <|endoftext|>

Length counts the symbols of the string, drawn independently and uniformly from `vocabulary` ones. The end of the answer
is scored too.

Source: Ruoss et al., "Randomized Positional Encodings Boost Length Generalization of Transformers" (2023),
arXiv:2305.16843, and Kazemnejad et al. (2023), arXiv:2305.19466, which both use it.
Deviates: 32 symbols and lengths 4 to 16, for models of 100,000 parameters.
"""

import dataclasses

from posbench.tasks._strings import OfAString
from posbench.tasks.base import Integers


@dataclasses.dataclass(frozen=True)
class Reverse(OfAString):
    shortest: int = 4
    longest: int = 16

    def answer(self, string: Integers) -> Integers:
        return string[:, ::-1]
