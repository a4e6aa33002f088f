"""Functional interpolation for relative positions (FIRE).

A small network turns each distance into a bias per head. Its input is the distance as a share of the farthest one the
query can see, so a longer text never brings inputs above 1, that is, none that training did not show:

    logits_ij = q_i·k_j / sqrt(d) + f( psi(i - j) / psi(max(i, threshold)) )_h,      psi(r) = ln(|c r| + 1)

f is 1 -> 32 -> H with ReLU. c (0.1 at the start), a multiplier of the threshold (1 at the start) and f are learned, per
layer. The threshold keeps short contexts from being stretched: up to it the bias depends on the distance alone.

f is piecewise linear in one number: 32 kinks, 33 straight pieces. Finding a distance's piece and applying that piece's
slope and intercept gives the same value as running the network on every pair, and the same gradients, for less.

Source: Li et al., "Functional Interpolation for Relative Positions Improves Long Context Transformers" (2023),
arXiv:2310.04418, section 3. The paper's threshold starts at 512; here at train_length, or a short training length would
leave part of the inputs unseen.
Beyond training length: defined everywhere; inputs stay within the trained range.
Checked against: the network run on each pair in a plain loop, and worked arguments.
"""

import torch
from torch import Tensor, nn

from posbench.encodings.base import Encoding, Rows, Shape
from posbench.kernels.bias import Dense

HIDDEN = 32


class FIRE(Encoding):
    def __init__(self, shape: Shape, threshold: float | None = None) -> None:
        super().__init__(shape)
        expected = "a position above 0, or null for train_length"
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
            bias = _interpolated(rows.distance, rows.positions, *self.pieces(rows.layer), *self.scales(rows.layer))
            return bias.movedim(0, 1)  # (1|B, H, Tq, Tk)

    def additions(self, q: Tensor, k: Tensor, x: Tensor | None, positions: Tensor, layer: int) -> Dense:
        kinks, *network = self.pieces(layer)
        c, threshold = self.scales(layer)

        def bias(distance: Tensor, where: Tensor, *learned: Tensor) -> Tensor:
            return _interpolated(distance, where, kinks, *learned)

        return Dense(bias, (*network, c, threshold), uniform_below=threshold)

    def share(self, distance: Tensor, positions: Tensor, layer: int) -> Tensor:
        """The network's input: psi of each distance over psi of the query's farthest, or of the threshold."""
        return _share(distance, positions, *self.scales(layer))

    def scales(self, layer: int) -> tuple[Tensor, Tensor]:
        """c, and the position up to which the bias depends on the distance alone."""
        return self.c[layer], (self.multiplier[layer] * self.threshold).abs()

    def pieces(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """The network as straight pieces: kinks (32,), slopes and intercepts (33, H) between them."""
        network = self.networks[layer]
        assert isinstance(network, nn.Sequential)
        first, _, last = network
        assert isinstance(first, nn.Linear) and isinstance(last, nn.Linear)
        weight, bias = first.weight[:, 0].float(), first.bias.float()
        # A unit that switches outside ±1e4 does so far from any share, which lies in 0 .. 1.
        kinks = (-bias / weight).detach().nan_to_num(0.0).clamp(-1e4, 1e4).sort().values
        middles = torch.cat([kinks[:1] - 1, (kinks[1:] + kinks[:-1]) / 2, kinks[-1:] + 1])
        active = (middles[:, None] * weight + bias > 0).float()  # (33, 32): which units are on in which piece
        out = last.weight.float().mT  # (32, H)
        return kinks, (active * weight) @ out, (active * bias) @ out + last.bias.float()


def _interpolated(
    distance: Tensor, positions: Tensor, kinks: Tensor, slope: Tensor, intercept: Tensor, c: Tensor, threshold: Tensor
) -> Tensor:
    """Bias (H, ..., Tq, Tk) of distances (..., Tq, Tk) from the queries' positions (..., Tq)."""
    share = _share(distance, positions, c, threshold)
    piece = torch.bucketize(share.detach(), kinks)
    return _each(slope, piece) * share + _each(intercept, piece)


def _each(table: Tensor, piece: Tensor) -> Tensor:
    """(33, H) looked up at (...): (H, ...). On CPUs the gradient of gather is far cheaper than that of indexing."""
    heads = table.shape[1]
    return table.mT.gather(1, piece.view(1, -1).expand(heads, -1)).view(heads, *piece.shape)


def _share(distance: Tensor, positions: Tensor, c: Tensor, threshold: Tensor) -> Tensor:
    farthest = torch.maximum(positions.float(), threshold)[..., None]
    return _psi(distance.float(), c) / (_psi(farthest, c) + 1e-6)


def _psi(distance: Tensor, c: Tensor) -> Tensor:
    return torch.log1p((c * distance).abs())
