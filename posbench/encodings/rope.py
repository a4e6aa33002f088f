"""Rotary position embedding (RoPE).

Turns each pair of query and key channels by an angle proportional to position. Only the difference of two rotations
remains in a product, so a logit depends on content and distance only:

    <R(m) q, R(n) k> = <q, R(n - m) k>
    R(m) = blockdiag over pairs p of [[cos a, -sin a], [sin a, cos a]],   a = m·base^(-2p/d)

The first pair turns by one radian per position, the last takes 2π·base positions per turn. Values are unchanged.

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021), arXiv:2104.09864, section 3.
Beyond training length: defined everywhere; slow pairs reach angles never seen in training and loss usually rises.
Checked against: transformers Llama (half) and GPT-J (interleaved).
"""

from posbench.encodings import _rotary as rotary
from posbench.encodings.base import Shape


class RoPE(rotary.PureRotary):
    def __init__(self, shape: Shape, base: float = 10000.0, layout: rotary.Layout = "interleaved") -> None:
        super().__init__(shape, base, layout)
