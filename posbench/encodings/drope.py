"""RoPE for most of the training, then no positions (DroPE).

    RoPE turns q and k in the first share `drop_at` of all updates; afterwards q and k stay unchanged

RoPE helps a model to learn, but its untrained angles fail on long inputs. The model therefore learns with RoPE and
spends the rest of the training without it. Evaluation always runs without positions; validation losses logged before
the drop are those with RoPE. The drop changes neither learning rate nor batches.

Source: Gelberg et al., "Extending the Context of Pretrained LLMs by Dropping Their Positional Embeddings" (2025),
arXiv:2512.12167. There a trained model is given a second, shorter training; the share of 0.1 in one training is ours.
Without their norm of queries and keys, and without their scale of the softmax for long inputs, which is a number per
model.
Beyond training length: defined everywhere; as without positions, attention then spreads over more keys than trained.
Checked against: torch scaled_dot_product_attention after the drop; before it, it is `rope`.
"""

import math
from typing import Any

from torch import Tensor

from posbench.encodings import _rotary as rotary
from posbench.encodings.base import Encoding, Layer, Shape
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

    def make_tables(self, positions: Tensor) -> Any:
        return None if self.dropped else self.rope.make_tables(positions)

    def at(self, layer: Layer) -> tuple[Encoding, Layer]:
        self.rope.window = self.window
        return (self if self.dropped else self.rope), layer
