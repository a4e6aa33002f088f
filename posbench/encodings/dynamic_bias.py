"""A network turns distances into biases (continuous position bias), the same in all layers.

    logits_ij = q_i·k_j / sqrt(d) + f(s(i - j))_h,   s(r) = sign(r)·ln(1 + |r|)   or, with `log: false`, r itself

f is 1 -> width -> ... -> H with SiLU and `depth` hidden layers, by default a quarter of the model's width wide.

Source: Liu et al., "Swin Transformer V2: Scaling Up Capacity and Resolution" (2021), arXiv:2111.09883, section 3.3,
in one dimension; the network as in x-transformers DynamicPositionBias (Swin's has one hidden layer of 512, ReLU).
Beyond training length: defined everywhere; the network goes on as a line or so past the inputs that it met.
Checked against: x-transformers DynamicPositionBias, and its network run at each pair.
"""

import itertools
from typing import Annotated

from annotated_types import Ge, Le
from torch import Tensor, nn

from posbench.encodings.base import Encoding, Layer, Shape
from posbench.options import Count


class DynamicBias(Encoding):
    name = "dynamic_bias"

    def __init__(
        self, shape: Shape, log: bool = True, width: Count | None = None, depth: Annotated[int, Ge(1), Le(100)] = 2
    ) -> None:
        super().__init__(shape)
        self.log = log
        width = width or max(1, shape.d_model // 4)
        pairs = itertools.pairwise([1, *[width] * depth])
        hidden = [nn.Sequential(nn.Linear(narrow, wide), nn.SiLU()) for narrow, wide in pairs]
        self.network = nn.Sequential(*hidden, nn.Linear(width, shape.n_heads))

    def distance_bias(self, distance: Tensor, layer: Layer) -> Tensor:
        inputs = distance.sign() * distance.abs().log1p() if self.log else distance.float()
        bias: Tensor = self.network(inputs[..., None])
        return bias.movedim(-1, 0)
