"""LongRoPE, from the first step on.

RoPE with one set of frequencies up to an original length L and another for longer sequences. q and k are multiplied by
a at every length. Meant to extend a trained RoPE (`extension=longrope`):

    f_p = f0_p up to L tokens, f0_p / long_factor_p beyond,   a = sqrt(1 + ln s / ln L)

The authors search the factors with an evolutionary algorithm. Without that search they are YaRN's divisors (index ramp,
alpha 1, beta 32). A longer input changes all its outputs, including those at the beginning. The set is chosen per
sequence, from its largest position; in transformers the longest sequence of a batch chooses for all.

Source: Ding et al., "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens" (2024), arXiv:2402.13753; Phi-3.
Beyond training length: defined everywhere; there the frequencies switch, untrained if original_length is train_length.
Checked against: transformers, rope_type `longrope`, given the divisors of its rope_type `yarn`.
"""

import math
from typing import Self

import torch
from torch import Tensor

from posbench import machine
from posbench.encodings import _frequencies as rules
from posbench.encodings import _rotary as rotary
from posbench.encodings.base import Shape


class LongRoPE(rotary.Rotary):
    length_dependent = True

    def __init__(
        self,
        shape: Shape,
        base: float = 10000.0,
        layout: rotary.Layout = "interleaved",
        factor: float = 4.0,
        original_length: int | None = None,
    ) -> None:
        super().__init__(shape, base, layout)
        self.expect(math.isfinite(factor) and factor >= 1, "factor", factor, "a number of at least 1")
        self.factor = factor
        self.original_length = shape.train_length if original_length is None else original_length
        at_least = "at least 2, or null for train_length"
        self.expect(self.original_length >= 2, "original_length", self.original_length, at_least)
        inv_freq = self.inv_freq(torch.device("cpu"))
        self.short = inv_freq  # frequencies up to the original length
        share = rules.ramp("index", inv_freq, base, self.original_length, alpha=1.0, beta=32.0)
        self.stretched = rules.by_parts(inv_freq, factor, share)
        self.attention_factor = rules.longrope_temperature(factor, self.original_length)

    def angles(self, positions: Tensor) -> Tensor:
        long = self.inv_freq(positions.device)
        beyond = (rotary.exact(positions).amax(-1) >= self.original_length)[:, None, None]  # (1|B, 1, 1)
        return rotary.angles(positions, torch.where(beyond, long, machine.sent(self.short, long.device)))

    def rescaled(self, inv_freq: Tensor, attention_factor: float = 1.0) -> Self:
        """A copy with both sets of frequencies scaled: per pair, by `inv_freq` over the present one of long inputs."""
        made = super().rescaled(inv_freq, attention_factor)
        made.short = self.short * (inv_freq / self.inv_freq(torch.device("cpu")))
        return made
