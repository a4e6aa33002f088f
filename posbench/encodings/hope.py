"""High-frequency rotary position encoding (HoPE).

RoPE, but only for pairs that make at least one rotation within the training length L. Training shows slower pairs only
some of their angles, so these carry no position at all:

    f_p = base^(-2p/d) where f_p·L >= 2π,   0 otherwise

Logits therefore have no built-in decay with distance. It is p-RoPE with a share of pairs that follows the training
length (of 64 channels, 16 pairs at 512 tokens and 9 at 64). It is also FoPE's frequencies without its mixing. With a
training length of 6 or less no pair turns.

Source: Chen et al., "HoPE: A Novel Positional Encoding Without Long-Term Decay for Enhanced Context Awareness and
Extrapolation" (2024), arXiv:2410.21216, whose abstract says that high frequencies are kept and the others replaced by
what does not depend on the position; the threshold is that of others' implementations, which name 2π/L as the paper's.
Beyond training length: defined everywhere; every pair that turns has been seen at all angles.
Checked against: plain loops; p_rope of as many pairs.
"""

import math

import torch

from posbench.encodings import _rotary as rotary
from posbench.encodings.base import Shape


class HoPE(rotary.PureRotary):
    def __init__(self, shape: Shape, base: float = 10000.0, layout: rotary.Layout = "interleaved") -> None:
        super().__init__(shape, base, layout)
        inv_freq = self.inv_freq(torch.device("cpu"))
        self.stretched = inv_freq * (inv_freq * shape.train_length >= 2 * math.pi)
