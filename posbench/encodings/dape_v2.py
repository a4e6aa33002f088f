"""DAPE V2: logits of neighbouring keys are read together, as a picture would be.

As DAPE's, a small network sees the logits z of all heads and what a static bias b would add to each, and adds what it
makes of them. Its two layers are convolutions along the keys, so that a pair also hears of the keys beside it:

    logits = z + b + conv2(leaky_relu(conv1([z ; b]))),   2H -> hidden -> H channels, each over `kernel` keys

In [z ; b], keys that the query does not see count as zeros, so that nothing is heard of them; so does what conv1 makes
of keys before the first that is seen. With a kernel of 1 this is DAPE. What conv1 makes of the keys just behind the
query counts; in the authors' code it does so but for the last query of an input, where padding makes it 0 and a longer
input would change it.

Every pair runs through the network, so this costs many times what the encoding inside does.

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
from posbench.encodings.base import Rows, Shape
from posbench.encodings.dape import DAPE


class DAPEV2(DAPE):
    def __init__(
        self,
        shape: Shape,
        inner: str = "kerple_log",
        inner_options: dict[str, Any] = NO_OPTIONS,
        hidden: int = 32,
        kernel: int = 3,
    ) -> None:
        super().__init__(shape, inner, inner_options, hidden)
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

    def scores(self, logits: Tensor, rows: Rows) -> Tensor:
        reach = self.reach
        first, leaky, second = cast(nn.Sequential, self.networks[rows.layer])
        # Keys that are seen, and for what the first convolution makes of them also those up to `reach` behind.
        heard = torch.stack([F.pad(rows.visible, (by, reach - by)) for by in range(reach + 1)]).any(0)
        with torch.autocast(logits.device.type, enabled=False):
            bias = self._bias(rows).expand_as(logits)
            seen = torch.cat([logits, bias], dim=1).masked_fill(~rows.visible, 0)  # (B, 2H, Tq, Tk)
            made = leaky(first(F.pad(seen, (reach, 2 * reach)))).masked_fill(~heard, 0)
            adapted: Tensor = second(F.pad(made, (reach, 0)))
            return logits + bias + adapted
