"""Stochastic positional encoding with sines (sineSPE), by its mean: each channel has a learned kernel of distance.

    logits_ij = sum over c of q_ic·k_jc·P_c(i - j) / sqrt(d)
    P_c(r) = (1 - g_c)·(1/2K)·sum over s = 1 .. K of softplus(gain_cs)^2·cos(2π f_cs r + phase_cs) + g_c

f_cs = sigmoid(.)/2 is in turns per token, g_c = sigmoid(.) a gate; all are learned per layer and head. A cosine of a
distance splits into products, as in RoPE: each channel of q and k becomes 2K + 1 channels.

Source: Liutkus et al., "Relative Positional Encoding for Transformers with Linear Complexity" (2021), arXiv:2105.08399,
and the authors' code (aliutkus/spe), whose start this is; there random processes with covariance P stand for P.
Beyond training length: defined everywhere; slow sines reach angles never seen in training.
Checked against: plain loops over pairs and channels from the authors' code.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings import rope as rotary
from posbench.encodings.base import Encoding, Layer, Shape
from posbench.options import Count


class SPE(Encoding):
    def __init__(self, shape: Shape, sines: Count = 1, gated: bool = True) -> None:
        super().__init__(shape)
        channels = (shape.n_layers, shape.n_heads, shape.head_dim)
        gain = torch.randn(*channels, sines)
        self.gain = nn.Parameter(2 * gain / gain.norm(dim=-1, keepdim=True).sqrt())
        self.frequency = nn.Parameter(torch.randn(*channels, sines) - 4)
        self.phase = nn.Parameter(torch.randn(*channels, sines))
        self.gate = nn.Parameter(torch.randn(channels)) if gated else None

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        places = rotary.double(layer.positions)[:, None, :, None, None]  # (1|B, 1, T, 1, 1)
        frequency, phase = (each[layer.index].to(places.device).double() for each in (self.frequency, self.phase))
        angles = math.pi * frequency.sigmoid()[:, None] * places  # (1|B, H, T, Dh, K)
        size = F.softplus(self.gain[layer.index]) / math.sqrt(2 * self.gain.shape[-1])  # (H, Dh, K)
        gate = None if self.gate is None else self.gate[layer.index]
        if gate is not None:
            size = size * (-gate).sigmoid().sqrt()[..., None]

        def widened(x: Tensor, angles: Tensor) -> Tensor:  # each channel times its waves, and once more for the gate
            waves = (size[:, None] * part.to(size) for part in (angles.cos(), angles.sin()))
            wide = (x[..., None] * torch.cat(tuple(waves), dim=-1)).flatten(-2)
            return wide if gate is None else torch.cat((wide, x * gate.sigmoid().sqrt()[:, None]), dim=-1)

        return widened(q, angles + phase[:, None]), widened(k, angles)
