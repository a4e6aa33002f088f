"""YaRN, from the first step on.

RoPE whose slow pairs, with at most alpha rotations within the training length L, turn s times slower; those with beta
or more stay as they are, the rest lie between. q and k are multiplied by a, so logits by a². Meant to extend a trained
RoPE (`extension=yarn`):

    f_p = (1 - g_p)·f0_p + g_p·f0_p/s,   a = 0.1·ln s + 1

The share g_p falls from 1 to 0 along the number of the pair (`ramp: index`, as the authors' code, transformers and vLLM
have it) or along its number of rotations L·f0_p/2π (`rotations`, as the paper has it); the two differ up to threefold.
An alpha that makes all pairs slow, or a beta that makes none, leaves no ramp and is refused.

Source: Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models" (2023), arXiv:2309.00071.
Beyond training length: defined everywhere; slow pairs reach unseen angles s times later than RoPE's.
Checked against: transformers, rope_type `yarn` (index); rope_type `llama3` and a plain loop (rotations).
"""

from posbench.encodings import _frequencies as rules
from posbench.encodings import _rotary as rotary
from posbench.encodings.base import Shape
from posbench.encodings.ntk_by_parts import NTKByParts


class YaRN(NTKByParts):
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
        super().__init__(shape, base, layout, factor, ramp, alpha, beta)
        self.attention_factor = rules.yarn_temperature(factor)
