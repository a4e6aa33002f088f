"""RoPE with learned frequencies (LeRoPE).

RoPE whose frequencies are learned: each pair has its own positive factor, which starts at 1. All layers and heads share
the factors:

    f_p = base^(-2p/d) · exp(alpha_p),   alpha_p = 0 at first

Source: "LeRoPE" (2026), arXiv:2607.10134; the formula is that of transformers' Mistral Large 4, without the scale that
this model gives its queries.
Beyond training length: defined everywhere; slow pairs reach angles never seen in training and loss usually rises.
Checked against: transformers Mistral Large 4.
"""

import torch
from torch import Tensor, nn

from posbench.encodings import _rotary as rotary
from posbench.encodings.base import Shape


class LeRoPE(rotary.PureRotary):
    def __init__(self, shape: Shape, base: float = 10000.0, layout: rotary.Layout = "interleaved") -> None:
        super().__init__(shape, base, layout)
        self.alpha = nn.Parameter(torch.zeros(shape.head_dim // 2))

    def inv_freq(self, device: torch.device) -> Tensor:
        given = super().inv_freq(device)
        if self.stretched is not None:  # an extension has stretched the learned frequencies
            return given
        return given * self.alpha.to(given.device).double().exp()
