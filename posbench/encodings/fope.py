"""Fourier position embedding (FoPE): each pair turns by a mixture of frequencies, all of them fully trained.

Frequencies that make less than one rotation within the training length L are dropped; M remain. Each of U pairs has one
of them as its own, plus all of them with small random weights that are never trained. Other pairs do not turn:

    z_u -> z_u · (sum over m of C_mu cos(i f_m) + i·sum over m of S_mu sin(i f_m)),   U = min(M, d/4),   f_m >= 2π/L

C and S are the identity (one frequency per pair) plus a normal draw (Xavier's, times `gain`), per head and layer. The
factor is no rotation, so a logit depends on both positions and not only on their distance.

Source: Hua et al., "Fourier Position Embedding: Enhancing Attention's Periodic Extension for Length Generalization"
(2024), arXiv:2412.17739. The pairs that do not turn have cosine 1 and sine 0, as the text says. The code behind the
authors' results gives them sine 1, which doubles their part of every logit: `still_sine: 1`. The draw is the
same in every run.
Beyond training length: defined everywhere; every frequency that is left has been seen at all angles.
Checked against: plain loops from the paper; without the draw it is RoPE on those pairs.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench import machine
from posbench.encodings import _rotary as rotary
from posbench.encodings.base import Encoding, Layer, Shape


class FoPE(Encoding):
    coefficients: Tensor  # of cosines and of sines: (2, layers, H, M, U)

    def __init__(
        self,
        shape: Shape,
        base: float = 10000.0,
        layout: rotary.Layout = "interleaved",
        gain: float = 0.3,
        learnable: bool = False,
        still_sine: float = 0.0,
    ) -> None:
        super().__init__(shape)
        self.expect(1 < base < math.inf, "base", base, "a number above 1")
        self.expect(0 <= gain < math.inf, "gain", gain, "a number of at least 0")
        self.expect(math.isfinite(still_sine), "still_sine", still_sine, "0, or 1 as in the authors' code")
        rotary.check_pairs(self.name, shape)
        self.layout: rotary.Layout = layout
        self.still_sine = still_sine
        every = rotary.frequencies(shape.head_dim, base, torch.device("cpu"))
        self.kept = every[every >= 2 * math.pi / shape.train_length]  # (M,) fp64
        turning = min(len(self.kept), shape.head_dim // 4)
        drawn = _drawn((2, shape.n_layers, shape.n_heads, len(self.kept), turning), gain)
        if learnable:
            self.coefficients = nn.Parameter(drawn)
        else:
            self.register_buffer("coefficients", drawn, persistent=False)

    def make_tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self._waves(positions, positions.device)

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        cosines, sines = layer.tables
        cosine, sine = (
            cosines @ self.coefficients[0, layer.index],
            sines @ self.coefficients[1, layer.index],
        )  # (1|B, H, T, U)
        still = (0, self.shape.head_dim // 2 - cosine.shape[-1])
        factor = torch.complex(F.pad(cosine, still, value=1.0), F.pad(sine, still, value=self.still_sine))
        made = rotary.laid_out(factor, self.layout)
        return rotary.turn(q, made), rotary.turn(k, made)

    def _waves(self, positions: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the M remaining frequencies: (1|B, 1, T, M) fp32 each."""
        turns = rotary.turns(rotary.angles(positions, machine.sent(self.kept, rotary.has_fp64(device))), device)
        return turns.real.contiguous(), turns.imag.contiguous()


def _drawn(size: tuple[int, ...], gain: float) -> Tensor:
    """Coefficients (..., H, M, U): pair u gets the frequency u·ceil(M/U), plus Xavier's normal draw with a gain."""
    coefficients = torch.zeros(size)
    heads, kept, turning = size[-3:]
    if not turning:
        return coefficients
    std = gain * math.sqrt(2 / (turning * (heads + kept)))  # the fans of a tensor of three axes: H·U and M·U
    coefficients.normal_(0, std, generator=torch.Generator().manual_seed(0))
    for pair, own in enumerate(range(0, kept, math.ceil(kept / turning))):
        coefficients[..., own, pair] += 1
    return coefficients
