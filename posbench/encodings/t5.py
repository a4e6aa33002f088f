"""T5's bucketed relative bias.

Every distance falls into one of a few buckets, and each head learns one number per bucket, the same in every layer:

    logits_ij = q_i·k_j / sqrt(d) + E[bucket(i - j), h]

Half of the buckets hold one distance each; the other half widen logarithmically up to max_distance, and all farther
distances share the last one:

    bucket(r) = r                                                             for r < n/2
    bucket(r) = min(n - 1, n/2 + floor(n/2 · ln(r / (n/2)) / ln(max_distance / (n/2))))   otherwise

This is the causal form of T5's decoder: keys after the query, visible only without a mask, share bucket 0. T5 leaves
out the 1/sqrt(d); here it stays, as for every encoding. E starts as T5's does: normal, deviation d_model^-1/2.

AdamW moves every number by at most about the learning rate per update, whatever its gradient. T5 trained for a million
updates. In a short training E stays small: in the demo's 488 updates no entry can move by more than 0.8. So E has a
learning rate of its own, `rate` times that of other parameters; 1 is T5's.

Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer" (2020),
arXiv:1910.10683, section 2.1.
Beyond training length: defined everywhere; distances past max_distance look alike, buckets never met stay untrained.
Checked against: transformers T5Attention, x-transformers RelativePositionBias.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings.base import Encoding, Layer, Shape


class T5Bias(Encoding):
    name = "t5"

    def __init__(self, shape: Shape, num_buckets: int = 32, max_distance: int = 128, rate: float = 10.0) -> None:
        super().__init__(shape)
        self.expect(num_buckets >= 2, "num_buckets", num_buckets, "at least 2")
        least = f"more than half of num_buckets, {num_buckets / 2:g}"
        self.expect(max_distance > num_buckets / 2, "max_distance", max_distance, least)
        self.expect(rate > 0, "rate", rate, "a number above 0")
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.table = nn.Parameter(torch.empty(num_buckets, shape.n_heads).normal_(std=shape.d_model**-0.5))
        self.rates = {} if rate == 1 else {"table": rate}

    def remarks(self) -> list[str]:
        trained = self.shape.train_length
        if self.max_distance <= trained:
            return []
        return [
            f"{self.name}: max_distance {self.max_distance} exceeds train_length {trained}: the last buckets are never "
            f"trained; encoding.max_distance={trained} trains every bucket"
        ]

    def distance_bias(self, distance: Tensor, layer: Layer) -> Tensor:
        return F.embedding(self.bucket(distance), self.table.float()).movedim(-1, 0)  # (H, *S)

    def bucket(self, distance: Tensor) -> Tensor:
        """Bucket numbers of distances of any shape, computed in fp32 as T5 does."""
        exact = self.num_buckets // 2
        r = distance.float().clamp(min=0)
        growth = torch.log(r.clamp(min=exact) / exact) / math.log(self.max_distance / exact)
        far = exact + (growth * (self.num_buckets - exact)).long()
        return torch.where(r < exact, r.long(), far.clamp(max=self.num_buckets - 1))
