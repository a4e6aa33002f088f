"""Stochastic positional encoding with sines (sineSPE), by its mean: each channel has a learned kernel of distance.

    logits_ij = sum over c of q_ic·k_jc·P_c(i - j) / sqrt(d)
    P_c(r) = (1 - g_c)·(1/2K)·sum over s = 1 .. K of softplus(gain_cs)^2·cos(2π f_cs r + phase_cs) + g_c

f_cs = sigmoid(.)/2 is up to half a turn per token. The gate g_c = sigmoid(.) passes content without position. Both are
learned per layer and head, as gains and phases are. The paper is made for linear attention, which cannot use P itself:
it multiplies queries and keys by random processes with covariance P. Softmax attention can use P, the mean of these
draws, without the noise. (The authors' own function for P leaves out 1/2K.)

A cosine of a distance splits into products, as in RoPE: each channel of q and k becomes 2K + 1 channels.

Source: Liutkus et al., "Relative Positional Encoding for Transformers with Linear Complexity" (2021), arXiv:2105.08399,
and the authors' code (aliutkus/spe), whose start this is: the median frequency takes 111 tokens to come round, whatever
the training length. Its experiments with music have 8 sines.
Beyond training length: defined everywhere; slow sines reach angles never seen in training.
Checked against: plain loops over pairs and channels from the authors' code.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings import _rotary as rotary
from posbench.encodings.base import Encoding, Layer, Shape


class SPE(Encoding):
    def __init__(self, shape: Shape, sines: int = 1, gated: bool = True) -> None:
        super().__init__(shape)
        self.expect(sines >= 1, "sines", sines, "at least 1")
        channels = (shape.n_layers, shape.n_heads, shape.head_dim)
        gain = torch.randn(*channels, sines)
        self.gain = nn.Parameter(2 * gain / gain.norm(dim=-1, keepdim=True).sqrt())
        self.frequency = nn.Parameter(torch.randn(*channels, sines) - 4)
        self.phase = nn.Parameter(torch.randn(*channels, sines))
        self.gate = nn.Parameter(torch.randn(channels)) if gated else None

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        size = F.softplus(self.gain[layer.index].float()) / math.sqrt(2 * self.gain.shape[-1])  # (H, Dh, K)
        if self.gate is not None:
            size = size * torch.sigmoid(-self.gate[layer.index].float()).sqrt()[..., None]
        places = rotary.exact(layer.positions)[:, None, :, None, None]  # (1|B, 1, T, 1, 1)
        turned, phase = (each[layer.index].to(places.device).double() for each in (self.frequency, self.phase))
        angles = math.pi * turned.sigmoid()[:, None] * places  # (1|B, H, T, Dh, K)
        both = torch.cat((size, size), dim=-1)[:, None]  # of cosine and sine
        asked, told = _waves(angles + phase[:, None], q.device), _waves(angles, q.device)
        return self._with(q, both * asked, layer.index), self._with(k, both * told, layer.index)

    def _with(self, a: Tensor, waves: Tensor, layer: int) -> Tensor:
        """q or k (B, H, T, Dh), each channel times its waves (1|B, H, T, Dh, 2K), and once more for the gate."""
        wide = (a.float()[..., None] * waves).flatten(-2)
        if self.gate is not None:
            wide = torch.cat((wide, a.float() * self.gate[layer].float().sigmoid().sqrt()[:, None]), dim=-1)
        return wide.to(a.dtype)


def _waves(angles: Tensor, device: torch.device) -> Tensor:
    """Cosines and sines side by side on the last axis, fp32."""
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device, torch.float32)
