"""NTK-by-parts, from the first step on: YaRN without its temperature.

RoPE whose slow pairs, with at most alpha rotations within the training length L, turn s times slower. Pairs with beta
or more are unchanged; the rest lie in between. Meant to extend a trained RoPE (`extension=ntk_by_parts`):

    f_p = (1 - g_p)·f0_p + g_p·f0_p/s

`ramp` sets how the share g_p falls from 1 to 0: along the pair's index (`index`, as in YaRN's code, transformers and
vLLM) or its number of rotations L·f0_p/2π (`rotations`, as in the paper). The two differ up to threefold. An alpha that
makes all pairs slow is refused, as is a beta that makes none slow: neither leaves a ramp.

Source: bloc97 (2023), as told by Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models"
(2023), arXiv:2309.00071, section 3.2.
Beyond training length: defined everywhere; slow pairs reach unseen angles s times later than RoPE's.
Checked against: transformers, rope_type `yarn` without its factor (index); rope_type `llama3` (rotations).
"""

import math

import torch

from posbench.encodings import _frequencies as rules
from posbench.encodings import _rotary as rotary
from posbench.encodings.base import Shape


class NTKByParts(rotary.PureRotary):
    name = "ntk_by_parts"

    def __init__(
        self,
        shape: Shape,
        base: float = 10000.0,
        layout: rotary.Layout = "interleaved",
        factor: float = 4.0,
        ramp: rules.Ramp = "index",
        alpha: float = 1.0,
        beta: float = 32.0,
    ) -> None:
        super().__init__(shape, base, layout)
        self.expect(math.isfinite(factor) and factor >= 1, "factor", factor, "a number of at least 1")
        inv_freq = self.inv_freq(torch.device("cpu"))
        rotations = shape.train_length * inv_freq / (2 * math.pi)
        most, least = rotations[0].item(), rotations[-1].item()
        above_0 = f"a number above 0 and below {most:.4g}, the rotations of the fastest pair within train_length"
        self.expect(0 < alpha < most, "alpha", alpha, above_0)
        above_alpha = f"a number above alpha, {alpha:g}, and above {least:.4g}, the rotations of the slowest pair"
        self.expect(max(alpha, least) < beta < math.inf, "beta", beta, above_alpha)
        share = rules.ramp(ramp, inv_freq, base, shape.train_length, alpha, beta)
        self.stretched = rules.by_parts(inv_freq, factor, share)
        self.factor, self.ramp, self.alpha, self.beta = factor, ramp, alpha, beta

    def remarks(self) -> list[str]:
        found = rules.ramp_remarks(self.ramp, self.shape.train_length, self.beta)
        return [f"{self.name}: {remark}" for remark in found]
