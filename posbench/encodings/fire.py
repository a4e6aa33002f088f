"""Functional interpolation for relative positions (FIRE).

A small network turns each distance into a bias per head. Its input is the distance as a share of the query's longest
one. So a longer text never brings inputs above 1, and training has shown all inputs:

    logits_ij = q_i·k_j / sqrt(d) + f( psi(i - j) / psi(max(i, threshold)) )_h,      psi(r) = ln(|c r| + 1)

f is 1 -> 32 -> H with ReLU. c (0.1 at the start), a multiplier of the threshold (1 at the start) and f are learned, per
layer. The threshold prevents stretching in short contexts: up to it, the bias depends on the distance alone.

f is piecewise linear in one number: 32 kinks, 33 straight pieces. Finding a distance's piece and applying its slope and
intercept gives the same values and gradients as running the network on every pair, at a lower cost.

Source: Li et al., "Functional Interpolation for Relative Positions Improves Long Context Transformers" (2023),
arXiv:2310.04418, section 3. The paper's threshold starts at 512, a quarter of its training length; so it does here.
With `threshold: null` it starts at train_length: then the bias depends on the distance alone until training lowers it.
One demo run each: 3.890 nats per token at the training length with a quarter, 3.887 with null; at 8x 4.086 and 4.088.
Beyond training length: defined everywhere; inputs stay within the trained range.
Checked against: the network run on each pair in a plain loop, and worked arguments.
"""

import math
from typing import Literal, cast

import torch
from torch import Tensor, nn

from posbench.encodings.base import Encoding, Rows, Shape, once
from posbench.kernels.bias import Bias, Dense, LaidOut, Lines, on_lines
from posbench.kernels.native import fits

HIDDEN = 32
QUARTER = 0.25  # of train_length: the paper's threshold of 512, at its training length of 2048
# Without the C++ kernel: the most bias entries (layers x heads x pairs) that one call computes for all layers. It saves
# many small operations. Beyond this number each layer computes its own, by blocks of rows, and keeps none.
LAID_OUT = 2**22


class FIRE(Encoding):
    def __init__(self, shape: Shape, threshold: float | Literal["quarter"] | None = "quarter") -> None:
        super().__init__(shape)
        if threshold == "quarter":
            threshold = QUARTER * shape.train_length
        expected = "a position above 0, quarter, or null for train_length"
        self.expect(threshold is None or threshold > 0, "threshold", threshold, expected)
        self.threshold = float(threshold or shape.train_length)
        self.c = nn.Parameter(torch.full((shape.n_layers,), 0.1))
        self.multiplier = nn.Parameter(torch.ones(shape.n_layers))
        self.networks = nn.ModuleList(
            nn.Sequential(nn.Linear(1, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, shape.n_heads))
            for _ in range(shape.n_layers)
        )

    def bias(self, rows: Rows) -> Tensor:
        with torch.autocast(rows.distance.device.type, enabled=False):
            bias = _interpolated(rows.distance, rows.positions, *self.learned(slice(rows.layer, rows.layer + 1)))
            return bias[0].movedim(0, 1)  # (1|B, H, Tq, Tk)

    def additions(self, q: Tensor, k: Tensor, x: Tensor | None, positions: Tensor, layer: int) -> Bias:
        layers, length = len(self.networks), q.shape[2]
        if fits(q, k):
            return once(positions, self, lambda: self._lines(length))[layer]
        if layers * self.shape.n_heads * length**2 <= LAID_OUT:
            everywhere = once(positions, self, lambda: Dense(_interpolated, self.learned(slice(None))).laid_out(length))
            return LaidOut(everywhere[layer])
        kinks, slope, intercept, c, threshold = self.learned(slice(layer, layer + 1))

        def bias(distance: Tensor, where: Tensor, *learned: Tensor) -> Tensor:
            return _interpolated(distance, where, kinks, *learned)[0]

        return Dense(bias, (slope, intercept, c, threshold), uniform_below=threshold)

    def _lines(self, length: int) -> list[Lines]:
        """Every layer's bias of consecutive tokens, from one computation for all layers."""
        kinks, slopes, intercepts, c, threshold = self.learned(slice(None))
        where = torch.arange(length)
        curves, scales = _psi(where.float(), c[:, None]), _scale(where, c[:, None], threshold[:, None])
        uniform = math.ceil(min(length, float(threshold.detach().min())))  # a NaN threshold gives the length
        uniform += -uniform % Lines.STEP if uniform == length else -(uniform % Lines.STEP)
        return [Lines(*layer, uniform) for layer in zip(kinks, slopes, intercepts, curves, scales, strict=True)]

    def learned(self, layers: slice) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Some layers' networks as straight pieces, with the parameters that scale their input.

        Returns:
            kinks (L, 32), slopes and intercepts (L, 33, H) of the pieces between them, c (L,), and thresholds (L,): the
            positions up to which the bias depends on the distance alone.
        """
        networks = [cast("nn.Sequential", network) for network in self.networks[layers]]
        first, last = ([cast("nn.Linear", network[i]) for network in networks] for i in (0, 2))
        weight = torch.stack([linear.weight[:, 0] for linear in first]).float()
        bias = torch.stack([linear.bias for linear in first]).float()
        # A kink outside ±1e4 is far from every input: these are shares in 0 .. 1.
        kinks = (-bias / weight).detach().nan_to_num(0.0).clamp(-1e4, 1e4).sort().values
        middles = torch.cat([kinks[:, :1] - 1, (kinks[:, 1:] + kinks[:, :-1]) / 2, kinks[:, -1:] + 1], dim=1)
        weight, bias = weight[:, None], bias[:, None]
        active = (middles[..., None] * weight + bias > 0).float()  # (L, 33, 32): which units are on in which piece
        out = torch.stack([linear.weight.mT for linear in last]).float()  # (L, 32, H)
        at_zero = torch.stack([linear.bias for linear in last]).float()
        slope, intercept = (active * weight) @ out, (active * bias) @ out + at_zero[:, None]
        return kinks, slope, intercept, self.c[layers], (self.multiplier[layers] * self.threshold).abs()


def _interpolated(
    distance: Tensor, positions: Tensor, kinks: Tensor, slope: Tensor, intercept: Tensor, c: Tensor, threshold: Tensor
) -> Tensor:
    """Bias (L, H, ..., Tq, Tk) for distances (..., Tq, Tk) and query positions (..., Tq)."""
    return on_lines(_share(distance, positions, c, threshold), kinks, slope, intercept)


def _share(distance: Tensor, positions: Tensor, c: Tensor, threshold: Tensor) -> Tensor:
    """The input of each layer's network, psi(distance) / psi(max(query position, threshold)): (L, ..., Tq, Tk)."""
    c, threshold = (x.view(-1, *[1] * distance.dim()) for x in (c, threshold))
    return _psi(distance.float(), c) * _scale(positions[..., None], c, threshold)


def _scale(positions: Tensor, c: Tensor, threshold: Tensor) -> Tensor:
    return 1 / (_psi(torch.maximum(positions.float(), threshold), c) + 1e-6)


def _psi(distance: Tensor, c: Tensor) -> Tensor:
    return torch.log1p((c * distance).abs())
