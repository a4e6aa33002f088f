"""Llama 3.1's frequencies, from the first step on.

RoPE whose slow pairs, with at most one rotation within the training length L, turn s times slower. Pairs with four or
more rotations are unchanged; in between, the change is linear in the number of rotations. Meant to extend a trained
RoPE (`extension=llama3`):

    f_p = (1 - g_p)·f0_p/s + g_p·f0_p,   g_p = clip((L·f0_p/2π - low) / (high - low), 0, 1)

Source: Grattafiori et al., "The Llama 3 Herd of Models" (2024), arXiv:2407.21783; the rule is that of transformers'
rope_type `llama3`. Llama's own base is 500000.
Beyond training length: defined everywhere; slow pairs reach unseen angles s times later than RoPE's.
Checked against: transformers, rope_type `llama3`.
"""

import math

import torch

from posbench.encodings import _frequencies as rules
from posbench.encodings import _rotary as rotary
from posbench.encodings.base import Shape


class Llama3(rotary.PureRotary):
    def __init__(
        self,
        shape: Shape,
        base: float = 10000.0,
        layout: rotary.Layout = "interleaved",
        factor: float = 8.0,
        low_freq_factor: float = 1.0,
        high_freq_factor: float = 4.0,
    ) -> None:
        super().__init__(shape, base, layout)
        self.expect(math.isfinite(factor) and factor >= 1, "factor", factor, "a number of at least 1")
        self.expect(low_freq_factor > 0, "low_freq_factor", low_freq_factor, "a number above 0")
        above = f"a number above low_freq_factor, {low_freq_factor:g}"
        self.expect(low_freq_factor < high_freq_factor < math.inf, "high_freq_factor", high_freq_factor, above)
        inv_freq = self.inv_freq(torch.device("cpu"))
        share = rules.ramp("rotations", inv_freq, base, shape.train_length, low_freq_factor, high_freq_factor)
        self.stretched = rules.by_parts(inv_freq, factor, share)
        self.factor, self.low_freq_factor, self.high_freq_factor = factor, low_freq_factor, high_freq_factor

    def remarks(self) -> list[str]:
        found = rules.ramp_remarks("rotations", self.shape.train_length, self.high_freq_factor)
        return [f"{self.name}: {remark}" for remark in found]
