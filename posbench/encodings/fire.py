"""Functional interpolation for relative positions (FIRE): a network turns shares of the longest distance into biases.

    logits_ij = q_i·k_j / sqrt(d) + f( psi(i - j) / psi(max(i, threshold)) )_h,      psi(r) = ln(|c r| + 1)

f is 1 -> 32 -> H with ReLU. c (0.1 at the start), a multiplier of the threshold (1 at the start) and f are learned,
per layer. Up to the threshold, the bias depends on the distance alone; a longer text never brings inputs above 1.

Source: Li et al., "Functional Interpolation for Relative Positions Improves Long Context Transformers" (2023),
arXiv:2310.04418, section 3. The threshold starts at a quarter of train_length, as the paper's 512 of 2048; with
`threshold: null` at train_length.
Beyond training length: defined everywhere; inputs stay within the trained range.
Checked against: the network run on each pair in a plain loop, and worked arguments.
"""

from typing import Literal, cast

import torch
from torch import Tensor, nn

from posbench.encodings.base import Encoding, Layer, Shape
from posbench.options import Positive


class FIRE(Encoding):
    def __init__(self, shape: Shape, threshold: Positive | Literal["quarter"] | None = "quarter") -> None:
        super().__init__(shape)
        self.threshold = shape.train_length / 4 if threshold == "quarter" else float(threshold or shape.train_length)
        self.c = nn.Parameter(torch.full((shape.n_layers,), 0.1))
        self.multiplier = nn.Parameter(torch.ones(shape.n_layers))
        self.networks = nn.ModuleList(
            nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, shape.n_heads)) for _ in range(shape.n_layers)
        )

    def bias(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        c, threshold = self.c[layer.index], (self.multiplier[layer.index] * self.threshold).abs()
        longest = torch.maximum(layer.positions[:, layer.rows, None], threshold)
        shares = _psi(layer.distance, c) / (_psi(longest, c) + 1e-6)  # (1|B, Tq, Tk)
        return _network(cast("nn.Sequential", self.networks[layer.index]), shares).movedim(0, 1)


def _psi(distance: Tensor, c: Tensor) -> Tensor:
    return (c * distance).abs().log1p()


def _network(network: nn.Sequential, shares: Tensor) -> Tensor:
    """Return a layer's network of shares (*S), (H, *S), at a lower cost: 33 straight pieces between 32 kinks."""
    first, last = cast("nn.Linear", network[0]), cast("nn.Linear", network[2])
    weight, bias = first.weight[:, 0], first.bias
    # A kink outside ±1e4 is far from every input: these are shares in 0 .. 1.
    kinks = (-bias / weight).detach().nan_to_num(0.0).clamp(-1e4, 1e4).sort().values
    middles = torch.cat([kinks[:1] - 1, (kinks[1:] + kinks[:-1]) / 2, kinks[-1:] + 1])
    active = (middles[:, None] * weight + bias > 0).to(weight.dtype)  # (33, 32): which units are on in which piece
    slopes, intercepts = (active * weight) @ last.weight.mT, (active * bias) @ last.weight.mT + last.bias  # (33, H)
    piece = torch.searchsorted(kinks, shares.detach()).flatten()

    def each(table: Tensor) -> Tensor:  # on CPUs the gradient of gather is far cheaper than of indexing
        return table.mT.gather(1, piece.expand(table.shape[1], -1)).view(-1, *shares.shape)

    return each(slopes) * shares + each(intercepts)
