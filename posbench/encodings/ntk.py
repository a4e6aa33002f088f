"""NTK-aware RoPE, from the first step on.

RoPE with a larger base: the fastest pair keeps its speed and the slowest turns s times slower. Meant to extend a
trained RoPE (`extension=ntk`):

    b' = b·s^(d/(d-2)),   f_p = b'^(-2p/d) = b^(-2p/d) · s^(-2p/(d-2))

Source: bloc97, "NTK-Aware Scaled RoPE allows LLaMA models to have extended (8k+) context size" (2023),
reddit.com/r/LocalLLaMA.
Beyond training length: defined everywhere; slow pairs reach angles never seen in training and loss usually rises.
Checked against: x-transformers RotaryEmbedding, base_rescale_factor.
"""

import math

import torch

from posbench.encodings import _frequencies as rules
from posbench.encodings import _rotary as rotary
from posbench.encodings.base import Shape


class NTK(rotary.PureRotary):
    def __init__(
        self, shape: Shape, base: float = 10000.0, layout: rotary.Layout = "interleaved", factor: float = 4.0
    ) -> None:
        super().__init__(shape, base, layout)
        self.expect(math.isfinite(factor) and factor >= 1, "factor", factor, "a number of at least 1")
        self.factor = factor
        self.stretched = rules.ntk(self.inv_freq(torch.device("cpu")), factor)
