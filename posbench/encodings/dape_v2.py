"""DAPE V2: logits of neighbouring keys are read together, as a picture would be.

As in DAPE, a small network reads the logits z and a static bias b of all heads, and its output is added. Here its two
layers are convolutions along the keys, so that it also reads the neighbouring keys:

    logits = z + b + conv2(leaky_relu(conv1([z ; b]))),   2H -> hidden -> H channels, each over `kernel` keys

In [z ; b], hidden keys count as zeros, so that nothing leaks from them. conv1's outputs before the first visible key
are zeros too. With a kernel of 1 this is DAPE. conv1's outputs just after the query count. The authors' code agrees
except at the last query of an input: padding makes them 0 there, so a longer input would change that query.

Every pair runs through the network, so this costs many times as much as the inner encoding.

Source: Zheng et al., "DAPE V2: Process Attention Score as Feature Map for Length Extrapolation" (2024),
arXiv:2410.04798; the convolutions as in the authors' code (chuanyang-Zheng/DAPE), kernel 3 and hidden 32 by its
configurations.
Beyond training length: defined as far as the encoding inside; the network may have to judge biases it has not met.
Checked against: plain loops around the oracle of the encoding inside; with a kernel of 1, it is dape.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings._wrapper import NO_OPTIONS
from posbench.encodings.base import Layer, Shape
from posbench.encodings.dape import DAPE


class DAPEV2(DAPE):
    name = "dape_v2"

    def __init__(
        self,
        shape: Shape,
        inner: str = "kerple_log",
        inner_options: dict[str, Any] = NO_OPTIONS,
        hidden: int = 32,
        kernel: int = 3,
        per_layer: bool = True,
    ) -> None:
        super().__init__(shape, inner, inner_options, hidden, per_layer)
        self.expect(kernel >= 1 and kernel % 2 == 1, "kernel", kernel, "an odd number of keys")
        self.reach = kernel // 2  # keys to either side
        self.networks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(2 * shape.n_heads, hidden, (1, kernel)),
                nn.LeakyReLU(),
                nn.Conv2d(hidden, shape.n_heads, (1, kernel)),
            )
            for _ in range(shape.n_layers)
        )

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        reach = self.reach
        first, leaky, second = cast(nn.Sequential, self.networks[layer.index])
        # Visible keys and the `reach` keys after them, where the first convolution still sees visible ones.
        heard = torch.stack([F.pad(layer.visible, (by, reach - by)) for by in range(reach + 1)]).any(0)
        bias = self._bias(q, k, layer).expand_as(logits)
        seen = torch.cat([logits, bias], dim=1).masked_fill(~layer.visible, 0)  # (B, 2H, Tq, Tk)
        made = leaky(first(F.pad(seen, (reach, 2 * reach)))).masked_fill(~heard, 0)
        adapted: Tensor = second(F.pad(made, (reach, 0)))
        return logits + bias + adapted
