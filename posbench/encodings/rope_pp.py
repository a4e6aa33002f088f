"""RoPE++: heads come in twos, one with RoPE's logits and one with their imaginary part.

With pairs of channels as complex numbers, RoPE's logit is the real part of sum over p of q_p·conj(k_p)·e^(i(m - n)f_p).
Here two heads share queries, keys and values. The second one has the imaginary part, which is the real part after
turning the query back by a quarter:

    first:  <R(m) q, R(n) k>      second:  <R(m) J q, R(n) k>,   J turns each pair by -π/2

From distance 0 on, a cosine falls and a sine rises: second heads look farther. This is the authors' form with an equal
number of heads (EH). It halves queries, keys and values. Here the second head's own are computed but unused, except
keys and values that the model shares among its heads (`n_kv_heads`). The last of an odd number of heads is a first one.
Without the sharing this would be RoPE, as a learned projection can make the quarter turn.

Source: Liu et al., "Beyond Real: Imaginary Extension of Rotary Position Embeddings for Long-Context LLMs" (2025),
arXiv:2512.07525; the sign is that of the authors' code.
Beyond training length: defined everywhere; slow pairs reach angles never seen in training and loss usually rises.
Checked against: plain loops over complex numbers.
"""

import torch
from torch import Tensor

from posbench.encodings import _rotary as rotary
from posbench.encodings.base import Layer, Shape


class RoPEPlusPlus(rotary.Rotary):
    name = "rope_pp"

    def __init__(self, shape: Shape, base: float = 10000.0, layout: rotary.Layout = "interleaved") -> None:
        super().__init__(shape, base, layout)

    def make_tables(self, positions: Tensor) -> list[tuple[Tensor, ...]]:
        return self._turns(positions, positions.device)

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        of_q, of_k = layer.tables
        return rotary.turn(_shared(q), of_q), rotary.turn(_shared(k), of_k)

    def map_values(self, v: Tensor, layer: Layer) -> Tensor:
        return _shared(v)

    def _turns(self, positions: Tensor, device: torch.device) -> list[tuple[Tensor, ...]]:
        """Turns of queries and of keys, as `rotary.turn` takes them."""
        rotation = self.rotation(positions, device)
        quarter = torch.ones(self.shape.n_heads, 1, 1, dtype=rotation.dtype, device=device)
        quarter[1::2].mul_(-1j)
        return [rotary.laid_out(turns, self.layout) for turns in (rotation * quarter, rotation)]


def _shared(a: Tensor) -> Tensor:
    """(B, H, T, Dh) with every second head replaced by the one before it."""
    return a[:, ::2].repeat_interleave(2, dim=1)[:, : a.shape[1]]
