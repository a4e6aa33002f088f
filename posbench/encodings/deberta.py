"""DeBERTa's disentangled attention: content and position are two vectors, of whose products three are kept.

    logits_ij = [q_i·k_j + q_i·(K p_r) + (Q p_r)·k_j] / sqrt(3d),   r = clip(i - j, -S, S - 1)

The 2S vectors p are shared by all layers; Q and K map them into each layer's heads. With `num_buckets` b (v2 and v3:
256) S is b; distances up to b/2 have their own vectors, and farther ones share:

    bucket(r) = sign(r)·(b/2 + ceil((b/2 - 1)·ln(2|r|/b) / ln(2(max_distance - 1)/b)))   for |r| > b/2

Source: He et al., "DeBERTa: Decoding-enhanced BERT with Disentangled Attention" (2020), arXiv:2006.03654, section 3,
with the last term at i - j, as in the authors' code. Without `share_att_key`, biases, and its absolute positions.
Beyond training length: defined everywhere; distances beyond S, by default the training length, are one class.
Checked against: transformers DeBERTa-v2, with and without buckets.
"""

import torch
from torch import Tensor, nn

from posbench.encodings.base import Encoding, Layer, Shape, part_of
from posbench.options import Count


class DeBERTa(Encoding):
    def __init__(self, shape: Shape, max_distance: Count | None = None, num_buckets: int | None = None) -> None:
        super().__init__(shape)
        self.max_distance = max_distance or shape.train_length
        fits = num_buckets is None or (num_buckets % 2 == 0 and 4 <= num_buckets < self.max_distance)
        self.expect(fits, "num_buckets", num_buckets, f"an even number from 4 to below {self.max_distance}, or null")
        self.num_buckets, self.span = num_buckets, num_buckets or self.max_distance
        heads = (shape.n_layers, shape.n_heads, shape.head_dim, shape.d_model)
        self.table = nn.Parameter(torch.randn(2 * self.span, shape.d_model) * 0.02)  # p
        self.keys, self.queries = (nn.Parameter(torch.randn(heads) * 0.02) for _ in "KQ")

    @property
    def logit_scale(self) -> float:
        return float((3 * self.shape.head_dim) ** -0.5)

    def prepare(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        return q  # before anything around this encoding scales them

    def bias(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        q, whole = part_of(layer.state, layer.rows), layer.distance.round()
        rows = (whole if self.num_buckets is None else self.bucket(whole)).long() + self.span
        rows = rows.clamp(0, 2 * self.span - 1)[:, None].expand(*q.shape[:3], -1)
        to_position = q @ (self.table @ self.keys[layer.index].mT).mT  # (B, H, Tq, 2S)
        from_position = k @ (self.table @ self.queries[layer.index].mT).mT  # (B, H, Tk, 2S)
        return (to_position.gather(-1, rows) + from_position.gather(-1, rows.mT).mT) * self.logit_scale

    def bucket(self, distance: Tensor) -> Tensor:
        """Return signed bucket numbers of whole distances of any shape, computed in fp32 as DeBERTa does."""
        middle = self.span // 2
        far = distance.abs().float().clamp(min=middle)
        growth = (far / middle).log() / torch.tensor((self.max_distance - 1) / middle).log()
        beyond = distance.sign() * ((growth * (middle - 1)).ceil() + middle)
        return torch.where(distance.abs() <= middle, distance, beyond)
