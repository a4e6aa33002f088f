"""Scale-invariant attention around another encoding: far logits spread and fall, so that all ranges weigh alike.

    logits'_ij = logits_ij · sqrt(2 ln(r/tau + 1) + 1) - 2 ln(r/tau + 1),   r = |i - j|

With normal logits, tokens 10 .. 100 back, 100 .. 1,000 back and so on then get the same total weight, as sparsely.

Source: Anson, Wang and Aitchison, "Scale-invariant Attention" (2025), arXiv:2505.17083, with its tau of 10, around RoPE
without its slow pairs, where the paper calls it p-RoPE.
Beyond training length: defined as far as the inner encoding is; the total weight of far keys grows with ln T alone.
Checked against: plain loops, on what the inner encoding is checked against. The equation is derived from the two
conditions of the paper, for normal logits; its own print of it was not read.
"""

from typing import Any

from torch import Tensor

from posbench.encodings.base import Encoding, Layer, Shape
from posbench.encodings.wrapper import NO_OPTIONS, Wrapper
from posbench.options import Positive


class ScaleInvariant(Wrapper):
    name = "scale_invariant"
    adds = ("scores",)

    def __init__(
        self, shape: Shape, inner: str = "p_rope", inner_options: dict[str, Any] = NO_OPTIONS, tau: Positive = 10.0
    ) -> None:
        super().__init__(shape)
        self.tau = tau
        self.wrap(inner, inner_options)

    def at(self, layer: Layer) -> tuple[Encoding, Layer]:
        inner, within = self.within(layer)

        def scores(logits: Tensor, q: Tensor, k: Tensor, inside: Layer) -> Tensor:
            growth = 2 * (inside.distance.abs() / self.tau).log1p()[:, None]
            return inner.scores(logits, q, k, inside) * (growth + 1).sqrt() - growth

        return self.altered(inner, scores=scores), within
