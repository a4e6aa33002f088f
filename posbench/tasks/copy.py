"""Copy: repeat the string.

    length 4    reads   <|endoftext|>  s7  s2  s2  s9  =   s7  s2  s2  s9
                scores                                 s7  s2  s2  s9  <|endoftext|>

Length counts the symbols of the string, drawn independently and uniformly from `vocabulary` ones. The end of the answer
is scored too: when to stop is part of the task.

Source: Kazemnejad et al., "The Impact of Positional Encoding on Length Generalization in Transformers" (2023),
arXiv:2305.19466: trained up to 20 symbols, tested up to 40.
Deviates: the shortest trained string has 8 symbols, since short ones teach little.
"""

import dataclasses

from posbench.tasks._strings import OfAString
from posbench.tasks.base import Integers


@dataclasses.dataclass(frozen=True)
class Copy(OfAString):
    shortest: int = 8
    longest: int = 20

    def answer(self, string: Integers) -> Integers:
        return string
