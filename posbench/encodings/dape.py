"""Networks over the heads that adapt the bias of another encoding to the content: DAPE and DAPE V2."""

import dataclasses
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings.base import Encoding, Layer, Shape
from posbench.encodings.wrapper import NO_OPTIONS, Wrapper, build_inner
from posbench.errors import UserError
from posbench.options import Count

BIASES = frozenset({"prepare", "distance_bias", "bias", "key_bias"})  # the hooks of an encoding that only adds a bias


class DAPE(Wrapper):
    """Data-adaptive positions (DAPE): a network over the heads adapts a bias to the content.

        logits_ij = z_ij + b_ij + W2 · leaky_relu(W1 · [z_ij ; b_ij] + c1) + c2,   z_ij = q_i·k_j / sqrt(d)

    z and b, the bias of the inner encoding, are vectors over the heads. Each layer has its own network and inner
    encoding (`per_layer: false`: one for all layers). Every pair runs through the network, which takes its time.

    Source: Zheng et al., "DAPE: Data-Adaptive Positional Encoding for Length Extrapolation" (2024), arXiv:2405.14722,
    section 3; the network as in the authors' code (chuanyang-Zheng/DAPE).
    Beyond training length: defined as far as the encoding inside; the network may have to judge biases it has not met.
    Checked against: plain loops around the oracle of the encoding inside.
    """

    def __init__(
        self, shape: Shape, inner: str = "kerple_log", inner_options: dict[str, Any] = NO_OPTIONS,
        hidden: Count = 32, per_layer: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(shape)
        shapes = [dataclasses.replace(shape, n_layers=1)] * shape.n_layers if per_layer else [shape]
        self.adopt([build_inner(inner, each, inner_options, "encoding.inner_options") for each in shapes])
        hooks = self.inner_encodings[0].hooks
        if not (hooks <= BIASES and hooks & {"distance_bias", "bias"}):
            raise UserError(f"encoding.inner is '{inner}': expected one that only adds a bias, such as alibi")
        self.networks = nn.ModuleList(
            nn.Sequential(nn.Linear(2 * shape.n_heads, hidden), nn.LeakyReLU(), nn.Linear(hidden, shape.n_heads))
            for _ in range(shape.n_layers)
        )

    @property
    def hooks(self) -> frozenset[str]:
        return frozenset({"prepare", "scores"})  # the bias of the inner encoding is added in `scores`

    def at(self, layer: Layer) -> tuple[Encoding, Layer]:
        return self, layer

    def prepare(self, q: Tensor, k: Tensor, layer: Layer) -> Any:
        inner, within = self._inner(layer)
        return inner.prepare(q, k, within)

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        inner, within = self._inner(layer)
        by_distance = inner.distance_bias(within.distance, within)
        bias = inner.bias(q, k, within) if by_distance is None else by_distance.movedim(0, 1)
        assert bias is not None  # one of the two hooks is there
        bias = bias.expand_as(logits)
        return logits + bias + self.adapted(torch.cat([logits, bias], dim=1), layer)

    def adapted(self, inputs: Tensor, layer: Layer) -> Tensor:
        """Return what is added (B, H, Tq, Tk) for logits and biases (B, 2H, Tq, Tk)."""
        out: Tensor = self.networks[layer.index](inputs.movedim(1, -1))
        return out.movedim(-1, 1)

    def _inner(self, layer: Layer) -> tuple[Encoding, Layer]:
        """Return the inner encoding for a layer, and the layer within it."""
        if len(self.inners) == 1:
            return self.within(layer)
        return self.within(layer.replace(index=0), layer.index)


class DAPEV2(DAPE):
    """DAPE V2: logits of neighbouring keys are read together, as a picture would be.

        logits = z + b + conv2(leaky_relu(conv1([z ; b]))),   2H -> hidden -> H channels, each over `kernel` keys

    z and b are those of `dape`. In [z ; b], hidden keys count as zeros, so that nothing leaks; conv1's outputs
    before the first visible key are zeros too, as are the authors' after an input's last query.

    Source: Zheng et al., "DAPE V2: Process Attention Score as Feature Map for Length Extrapolation" (2024),
    arXiv:2410.04798; the convolutions and their sizes as in the authors' code (chuanyang-Zheng/DAPE).
    Beyond training length: defined as far as the encoding inside; the network may have to judge biases it has not met.
    Checked against: plain loops around the oracle of the encoding inside; with a kernel of 1, it is dape.
    """

    name = "dape_v2"

    def __init__(
        self, shape: Shape, inner: str = "kerple_log", inner_options: dict[str, Any] = NO_OPTIONS,
        hidden: Count = 32, kernel: Count = 3, per_layer: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(shape, inner, inner_options, hidden, per_layer)
        self.expect(kernel % 2 == 1, "kernel", kernel, "an odd number of keys")
        self.reach = kernel // 2  # keys to either side
        widths = 2 * shape.n_heads, hidden, shape.n_heads
        self.networks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(*widths[:2], (1, kernel)), nn.LeakyReLU(), nn.Conv2d(*widths[1:], (1, kernel)))
            for _ in range(shape.n_layers)
        )

    def adapted(self, inputs: Tensor, layer: Layer) -> Tensor:
        reach, (first, leaky, second) = self.reach, cast(nn.Sequential, self.networks[layer.index])
        # Visible keys and the `reach` keys after them, where the first convolution still sees visible ones.
        reached = torch.stack([F.pad(layer.visible, (by, reach - by)) for by in range(reach + 1)]).any(0)
        visible = F.pad(inputs.masked_fill(~layer.visible, 0), (reach, 2 * reach))
        out: Tensor = second(F.pad(leaky(first(visible)).masked_fill(~reached, 0), (reach, 0)))
        return out
