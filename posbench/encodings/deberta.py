"""DeBERTa's disentangled attention.

A token is two vectors, content and position. Three of their four products are kept:

    logits_ij = [q_i·k_j + q_i·(K p_r) + (Q p_r)·k_j] / sqrt(3d),   r = clip(i - j, -S, S - 1)

The 2S vectors p are shared by all layers; Q and K map them into each layer's heads. The last term is looked up at i -
j, as in the authors' code; the paper's text has j - i. With a causal mask the vectors that look ahead stay unused.

With `num_buckets` b (v2 and v3: 256) S is b. Distances up to b/2 have their own vectors; farther ones share:

    bucket(r) = sign(r)·(b/2 + ceil((b/2 - 1)·ln(2|r|/b) / ln(2(max_distance - 1)/b)))   for |r| > b/2

Source: He et al., "DeBERTa: Decoding-enhanced BERT with Disentangled Attention" (2020), arXiv:2006.03654, section 3.
Without `share_att_key`, biases, and the absolute positions of its masked-word head.
Beyond training length: defined everywhere; distances beyond S are one class. With the default S, the training length,
such distances share the vector of the farthest one trained.
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
        below = f"an even number from 4 to below max_distance, {self.max_distance}, or null for none"
        self.expect(fits, "num_buckets", num_buckets, below)
        self.num_buckets = num_buckets
        self.span = num_buckets or self.max_distance
        heads = (shape.n_layers, shape.n_heads, shape.head_dim, shape.d_model)
        self.table = nn.Parameter(torch.randn(2 * self.span, shape.d_model) * 0.02)  # p
        self.keys = nn.Parameter(torch.randn(heads) * 0.02)  # K
        self.queries = nn.Parameter(torch.randn(heads) * 0.02)  # Q

    @property
    def logit_scale(self) -> float:
        return float((3 * self.shape.head_dim) ** -0.5)

    def prepare(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        """Return the queries, before anything around this encoding scales them."""
        return q

    def bias(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        q = part_of(layer.state, layer.rows)
        rows = self._table_rows(layer.distance)[:, None].expand(*q.shape[:3], -1)
        to_position = q @ (self.table @ self.keys[layer.index].mT).mT  # (B, H, Tq, 2S)
        from_position = k @ (self.table @ self.queries[layer.index].mT).mT  # (B, H, Tk, 2S)
        return (to_position.gather(-1, rows) + from_position.gather(-1, rows.mT).mT) * self.logit_scale

    def _table_rows(self, distance: Tensor) -> Tensor:
        """Return the table row of each distance; row S is distance 0."""
        whole = distance.round()
        place = whole if self.num_buckets is None else self.bucket(whole)
        return (place.long() + self.span).clamp(0, 2 * self.span - 1)

    def bucket(self, distance: Tensor) -> Tensor:
        """Return signed bucket numbers of whole distances of any shape, computed in fp32 as DeBERTa does."""
        assert self.num_buckets is not None
        middle = self.num_buckets // 2
        far = distance.abs().float().clamp(min=middle)
        growth = (far / middle).log() / torch.tensor((self.max_distance - 1) / middle).log()
        beyond = distance.sign() * ((growth * (middle - 1)).ceil() + middle)
        return torch.where(distance.abs() <= middle, distance, beyond)
