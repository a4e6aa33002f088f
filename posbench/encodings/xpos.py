"""Extrapolatable position embedding (xPos).

RoPE with a decay: with their position, queries shrink and keys grow, at a rate per pair of channels. So a logit falls
with distance, most in the fast pairs. Only for causal models:

    <q_i, k_j>_p is multiplied by zeta_p^((i - j)/B),   zeta_p = (2p/d + 0.4) / 1.4

Positions are centred first, which cancels in every logit and keeps the factors zeta^(i/B) and zeta^(-j/B) within fp32.

Source: Sun et al., "A Length-Extrapolatable Transformer" (2022), arXiv:2212.10554, section 3. The paper's B is 512;
here half of train_length, or a short training length would hardly see the decay. Its blockwise attention is left out.
Beyond training length: defined up to 128·B, where the factors leave fp32; far keys get ever less weight. That holds of
the span from the first position of a sequence to the last, however few tokens lie in between. Positions farther apart
are refused on a CPU; an accelerator or compiled code does not stop to look at them, and gives NaN.
Checked against: x-transformers RotaryEmbedding with use_xpos.
"""

import math

import torch
from torch import Tensor

from posbench.encodings import _rotary as rotary
from posbench.encodings.base import Layer, Shape
from posbench.errors import Undefined

GAMMA = 0.4


class XPos(rotary.Rotary):
    def __init__(
        self,
        shape: Shape,
        base: float = 10000.0,
        layout: rotary.Layout = "interleaved",
        scale_base: float | None = None,
    ) -> None:
        super().__init__(shape, base, layout)
        fits = scale_base is None or scale_base > 0
        tokens = "a number of tokens above 0, or null for train_length / 2"
        self.expect(fits, "scale_base", scale_base, tokens)
        self.scale_base = float(scale_base or max(1.0, shape.train_length / 2))
        self.max_length = int(128 * self.scale_base)

    def make_tables(self, positions: Tensor) -> list[tuple[Tensor, ...]]:
        return self._turns(positions, positions.device)

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        of_q, of_k = layer.tables
        return rotary.turn(q, of_q), rotary.turn(k, of_k)

    def _turns(self, positions: Tensor, device: torch.device) -> list[tuple[Tensor, ...]]:
        """Turns of queries and of keys, as `rotary.turn` takes them."""
        rotation, size = self.rotation(positions, device), self.decay(positions).to(device)
        return [rotary.laid_out(turns, self.layout) for turns in (rotation * size, rotation / size)]

    def decay(self, positions: Tensor) -> Tensor:
        """zeta^(i/B) of centred positions (1|B, T): (1|B, 1, T, d/2)."""
        i = rotary.exact(positions)
        first, last = i.amin(-1, keepdim=True), i.amax(-1, keepdim=True)
        centre = torch.where(self._defined(last - first), (first + last) / 2, math.nan)
        d = self.shape.head_dim
        zeta = (torch.arange(0, d, 2, dtype=torch.float64, device=i.device) / d + GAMMA) / (1 + GAMMA)
        return (zeta ** ((i - centre) / self.scale_base)[..., None]).float()[:, None]

    def _defined(self, span: Tensor) -> Tensor:
        """Whether the factors of sequences that span this many positions (1|B, 1) stay within fp32."""
        end = int(128 * self.scale_base)
        defined = span < end
        waits = span.device.type != "cpu" or torch.compiler.is_compiling()  # the host, for the values
        if not waits and not defined.all():
            raise Undefined(
                f"positions {span.max().item():g} apart are beyond the end of 'xpos' (its factors fit fp32 for less "
                f"than {end}); a larger encoding.scale_base reaches farther"
            )
        return defined
