"""A network turns distances into biases (continuous position bias).

A small network maps one number, the distance or its logarithm, to a bias per head, the same in all layers:

    logits_ij = q_i·k_j / sqrt(d) + f(s(i - j))_h,   s(r) = sign(r)·ln(1 + |r|)   or, with `log: false`, r itself

f is 1 -> width -> ... -> H with SiLU, `depth` hidden layers. The logarithm keeps inputs small at long distances: at 16
times the length they grow by ln 16, not 16-fold. The network is that of x-transformers, a quarter of the model's width
wide; Swin's has one hidden layer of 512 with ReLU.

Source: Liu et al., "Swin Transformer V2: Scaling Up Capacity and Resolution" (2021), arXiv:2111.09883, section 3.3,
in one dimension; x-transformers DynamicPositionBias.
Beyond training length: defined everywhere; the network goes on as a line or so past the inputs that it met.
Checked against: x-transformers DynamicPositionBias, and its network run at each pair.
"""

import itertools

from torch import Tensor, nn

from posbench.encodings.base import Encoding, Layer, Shape


class DynamicBias(Encoding):
    name = "dynamic_bias"

    def __init__(self, shape: Shape, log: bool = True, width: int | None = None, depth: int = 2) -> None:
        super().__init__(shape)
        self.expect(width is None or width >= 1, "width", width, "at least 1, or null for a quarter of the model's")
        self.expect(1 <= depth <= 100, "depth", depth, "1 to 100 hidden layers")
        self.log = log
        width = width or max(1, shape.d_model // 4)
        widths = [1, *[width] * depth]
        hidden = [nn.Sequential(nn.Linear(a, b), nn.SiLU()) for a, b in itertools.pairwise(widths)]
        self.network = nn.Sequential(*hidden, nn.Linear(width, shape.n_heads))

    def distance_bias(self, distance: Tensor, layer: Layer) -> Tensor:
        r = distance.float()
        seen = r.sign() * r.abs().log1p() if self.log else r
        bias: Tensor = self.network(seen[..., None])
        return bias.movedim(-1, 0)
