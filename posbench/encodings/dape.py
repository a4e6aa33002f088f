"""Data-adaptive positions (DAPE): a network over the heads adapts a bias to the content.

For each pair of query and key, a small network reads the logits and a static bias of all heads. Its output is added:

    logits_ij = z_ij + b_ij + W2 · leaky_relu(W1 · [z_ij ; b_ij] + c1) + c2,   z_ij = q_i·k_j / sqrt(d)

z and b are vectors over the heads. Each layer has its own network, 2H -> hidden -> H, and, as in the authors' code, an
inner encoding of its own (`per_layer: false`: one for all layers, with what it shares among them). The bias b is the
inner encoding's, unchanged (the authors' code makes the activation of an inner FIRE leaky). With W2 = 0 and c2 = 0 this
is the inner encoding.

Every pair runs through the network, so this costs many times as much as the inner encoding.

Source: Zheng et al., "DAPE: Data-Adaptive Positional Encoding for Length Extrapolation" (2024), arXiv:2405.14722,
section 3; the network as in the authors' code (chuanyang-Zheng/DAPE).
Beyond training length: defined as far as the encoding inside; the network may have to judge biases it has not met.
Checked against: plain loops around the oracle of the encoding inside.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from posbench.encodings._wrapper import NO_OPTIONS, Wrapper, build_inner
from posbench.encodings.base import Encoding, Layer, Shape
from posbench.errors import UserError

BIASES = frozenset({"prepare", "distance_bias", "bias", "key_bias"})  # the hooks of an encoding that only adds a bias


class DAPE(Wrapper):
    def __init__(
        self,
        shape: Shape,
        inner: str = "kerple_log",
        inner_options: dict[str, Any] = NO_OPTIONS,
        hidden: int = 32,
        per_layer: bool = True,
    ) -> None:
        super().__init__(shape)
        self.expect(hidden >= 1, "hidden", hidden, "at least 1")
        one = dataclasses.replace(shape, n_layers=1)
        shapes = [one] * shape.n_layers if per_layer else [shape]
        self.adopt([build_inner(inner, each, inner_options, "encoding.inner_options") for each in shapes])
        found = self.inner_encodings[0].hooks
        if not (found <= BIASES and found & {"distance_bias", "bias"}):
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

    def prepare(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, ...]:
        inner, within = self._inner(layer)
        return inner.prepare(q, k, within)

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        bias = self._bias(q, k, layer).expand_as(logits)
        seen = torch.cat([logits, bias], dim=1).movedim(1, -1)  # (B, Tq, Tk, 2H)
        adapted: Tensor = self.networks[layer.index](seen)
        return logits + bias + adapted.movedim(-1, 1)

    def _inner(self, layer: Layer) -> tuple[Encoding, Layer]:
        """The inner encoding for a layer, and the layer within it."""
        if len(self.inners) == 1:
            return self.inner_encodings[0].at(layer.replace(tables=layer.tables[0]))
        return self.inner_encodings[layer.index].at(layer.replace(index=0, tables=layer.tables[layer.index]))

    def _bias(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        """The bias of the inner encoding, broadcastable to (B, H, Tq, Tk)."""
        inner, within = self._inner(layer)
        by_distance = inner.distance_bias(within.distance, within)
        if by_distance is not None:
            return by_distance.movedim(0, 1)
        bias = inner.bias(q, k, within)
        assert bias is not None  # one of the two hooks is there
        return bias
