"""RoPE for most of the training, then no positions (DroPE).

    q and k turn as in RoPE in the updates before `drop_at` of all, and stay as they are from then on

RoPE helps a model to learn, and its angles beyond training are what breaks on long inputs: a model that has learned
with it is given the rest of the training to go on without. Evaluated it is a model without positions; losses on
validation text before the drop are those with RoPE. Learning rate and batches know nothing of the drop.

Source: Gelberg et al., "Extending the Context of Pretrained LLMs by Dropping Their Positional Embeddings" (2025),
arXiv:2512.12167. There a trained model is given a second, shorter training; the share of 0.1 in one training is ours.
Without their norm of queries and keys, and without their scale of the softmax for long inputs, which is a number per
model.
Beyond training length: defined everywhere; as without positions, attention then spreads over more keys than trained.
Checked against: torch scaled_dot_product_attention after the drop; before it, it is `rope`.
"""

import math

from posbench.encodings import _rotary as rotary
from posbench.encodings.base import Encoding, Shape
from posbench.encodings.rope import RoPE


class DroPE(Encoding):
    def __init__(
        self, shape: Shape, drop_at: float = 0.9, base: float = 10000.0, layout: rotary.Layout = "interleaved"
    ) -> None:
        super().__init__(shape)
        self.expect(1 < base < math.inf, "base", base, "a number above 1")
        self.expect(0 <= drop_at < 1, "drop_at", drop_at, "a share of the training of at least 0 and below 1")
        self.drop_at = drop_at
        self.dropped = True
        self.rope = RoPE(shape, base, layout)

    def set_progress(self, done: float) -> None:
        self.dropped = done >= self.drop_at

    def at(self, layer: int) -> tuple[Encoding, int]:
        self.rope.window = self.window
        return (self if self.dropped else self.rope), layer
