"""Dynamic NTK-aware RoPE, from the first step on.

RoPE up to an original length L. For longer inputs, the base grows with the input's length l: the slowest pair turns s
times slower, the fastest keeps its speed. Meant to extend a trained RoPE (`extension=dynamic_ntk`). As an encoding of
its own, it trains with changed frequencies only if L is less than the training length:

    f_p = b^(-2p/d) · s^(-2p/(d-2)),   s = max(1, factor·l/L - (factor - 1))

A longer input changes all its outputs, including those at the beginning. l is set per sequence, from its largest
position; in transformers the longest sequence of a batch sets it for all.

Source: emozilla, "Dynamically Scaled RoPE further increases performance of long context LLaMA with zero fine-tuning"
(2023), reddit.com/r/LocalLLaMA; the rule is that of transformers' rope_type `dynamic`.
Beyond training length: defined everywhere; slow pairs keep within the angles of the original length, the ones between
reach some that were never seen.
Checked against: transformers, rope_type `dynamic`.
"""

import math

from torch import Tensor

from posbench.encodings import _frequencies as rules
from posbench.encodings import _rotary as rotary
from posbench.encodings.base import Shape


class DynamicNTK(rotary.Rotary):
    name = "dynamic_ntk"
    length_dependent = True

    def __init__(
        self,
        shape: Shape,
        base: float = 10000.0,
        layout: rotary.Layout = "interleaved",
        factor: float = 1.0,
        original_length: int | None = None,
    ) -> None:
        super().__init__(shape, base, layout)
        self.expect(math.isfinite(factor) and factor >= 1, "factor", factor, "a number of at least 1")
        self.factor = factor
        self.original_length = shape.train_length if original_length is None else original_length
        at_least = "at least 1, or null for train_length"
        self.expect(self.original_length >= 1, "original_length", self.original_length, at_least)

    def angles(self, positions: Tensor) -> Tensor:
        length = rotary.exact(positions).amax(-1, keepdim=True) + 1  # (1|B, 1)
        s = rules.dynamic_factor(self.factor, length, self.original_length)
        return rotary.angles(positions, rules.ntk(self.inv_freq(positions.device), s)[:, None])
