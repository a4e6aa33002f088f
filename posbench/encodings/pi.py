"""Position interpolation (PI), from the first step on.

RoPE with every frequency divided by s, or equally with positions i/s: s tokens share the angle of one step. Meant to
extend a trained RoPE (`extension=pi`). As an encoding of its own it is a slower RoPE:

    f_p = base^(-2p/d) / s

Source: Chen et al., "Extending Context Window of Large Language Models via Positional Interpolation" (2023),
arXiv:2306.15595; kaiokendev (2023).
Beyond training length: defined everywhere; angles are unseen from the training length on, as for RoPE.
Checked against: transformers, rope_type `linear`.
"""

import math

import torch

from posbench.encodings import _frequencies as rules
from posbench.encodings import _rotary as rotary
from posbench.encodings.base import Shape


class PI(rotary.PureRotary):
    def __init__(
        self, shape: Shape, base: float = 10000.0, layout: rotary.Layout = "interleaved", factor: float = 4.0
    ) -> None:
        super().__init__(shape, base, layout)
        self.expect(math.isfinite(factor) and factor >= 1, "factor", factor, "a number of at least 1")
        self.factor = factor
        self.stretched = rules.pi(self.inv_freq(torch.device("cpu")), factor)
