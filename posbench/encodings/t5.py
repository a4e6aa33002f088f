"""T5's bucketed relative bias: each head learns a number per bucket of distances, the same in every layer.

    logits_ij = q_i·k_j / sqrt(d) + E[bucket(i - j), h]
    bucket(r) = r                                                             for r < n/2
    bucket(r) = min(n - 1, n/2 + floor(n/2 · ln(r / (n/2)) / ln(max_distance / (n/2))))   otherwise

E starts normal, with deviation d_model^-1/2. AdamW moves a number by at most about the learning rate per update, so
that E would stay small in short trainings: its learning rate is `rate` times that of others.

Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer" (2020),
arXiv:1910.10683, section 2.1, the causal form of the decoder, with the 1/sqrt(d) that T5 leaves out.
Beyond training length: defined everywhere; distances past max_distance look alike, buckets never met stay untrained.
Checked against: transformers T5Attention, x-transformers RelativePositionBias.
"""

import math
from typing import Annotated

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor, nn

from posbench.encodings.base import Encoding, Layer, Shape
from posbench.options import Positive


class T5Bias(Encoding):
    name = "t5"

    def __init__(
        self, shape: Shape, num_buckets: Annotated[int, Ge(2)] = 32, max_distance: int = 128, rate: Positive = 10.0
    ) -> None:
        super().__init__(shape)
        self.expect(2 * max_distance > num_buckets, "max_distance", max_distance, "more than half of num_buckets")
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.table = nn.Parameter(torch.empty(num_buckets, shape.n_heads).normal_(std=shape.d_model**-0.5))
        self.rates = {} if rate == 1 else {"table": rate}

    def remarks(self) -> list[str]:
        trained = self.shape.train_length
        exceeds = f"t5: max_distance {self.max_distance} exceeds train_length {trained}: the last ones stay untrained"
        return [f"{exceeds}; encoding.max_distance={trained} trains all"] if self.max_distance > trained else []

    def distance_bias(self, distance: Tensor, layer: Layer) -> Tensor:
        return F.embedding(self.bucket(distance), self.table).movedim(-1, 0)

    def bucket(self, distance: Tensor) -> Tensor:
        """Return bucket numbers of distances of any shape, computed in fp32 as T5 does."""
        exact = self.num_buckets // 2
        r = distance.float().clamp(min=0)
        growth = torch.log(r.clamp(min=exact) / exact) / math.log(self.max_distance / exact)
        far = exact + (growth * (self.num_buckets - exact)).long()
        return torch.where(r < exact, r.long(), far.clamp(max=self.num_buckets - 1))
