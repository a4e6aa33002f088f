"""Rules that stretch RoPE's frequencies, so that positions beyond the training length meet known angles.

`inv_freq` holds the radians per position of each pair, fastest first, (P,) fp64, f_p = base^(-p/P); s is the factor by
which the context grows. A pair that makes many rotations within the training length was trained at every angle. A pair
that makes less than one was not. The rules differ in which pairs they slow down, and by how much:

    pi             all, by s
    ntk            the last by s, the first not at all, those between geometrically
    by_parts       those with few rotations by s, those with many not at all, those between linearly (llama3, YaRN)
"""

import math
from typing import Literal

import torch
from torch import Tensor

Ramp = Literal["index", "rotations"]


def pi(inv_freq: Tensor, factor: float) -> Tensor:
    """Position interpolation: f / s, the same as positions / s."""
    return inv_freq / factor


def ntk(inv_freq: Tensor, factor: float | Tensor) -> Tensor:
    """A larger base, b·s^(d/(d-2)) = b·s^(P/(P-1)): f_p · s^(-p/(P-1)). Factors (N, 1) give (N, P)."""
    pairs = len(inv_freq)
    return inv_freq * factor ** (-torch.arange(pairs, dtype=torch.float64, device=inv_freq.device) / max(1, pairs - 1))


def dynamic_factor(factor: float, length: Tensor, train_length: int) -> Tensor:
    """The factor s for input lengths (fp64): 1 up to train_length, then factor·length/train_length - (factor - 1)."""
    return (factor * length / train_length - (factor - 1)).clamp(min=1)


def by_parts(inv_freq: Tensor, factor: float, share: Tensor) -> Tensor:
    """Each pair's mixture share·f/s + (1 - share)·f."""
    return inv_freq * (share / factor + (1 - share))


def ramp(kind: Ramp, inv_freq: Tensor, base: float, train_length: int, alpha: float, beta: float) -> Tensor:
    """How far each pair is interpolated: 0 where it makes beta rotations or more in training, 1 where alpha or fewer.

    In between, `rotations`, the papers' ramp, is linear in the number of rotations. `index`, the ramp of YaRN's
    authors, transformers and vLLM, is linear in the pair's index. It runs from the pair with beta rotations, rounded
    down, to the pair with alpha, rounded up, and never slows the first pair. It goes by the base alone: rotations are
    counted as plain RoPE makes them, even where the frequencies were learned or stretched before.

    Both ends of the index ramp are clamped to 0 .. 2P-1. Those implementations clamp the start from below and the end
    from above only. Their ramp reverses when both lie off the same end: it interpolates all pairs if each makes more
    than beta rotations, and none if each makes fewer than alpha. All other numbers are theirs.
    """
    if kind == "rotations":
        rotations = train_length * inv_freq / (2 * math.pi)
        return 1 - ((rotations - alpha) / (beta - alpha)).clamp(0, 1)
    pairs = len(inv_freq)
    low = min(max(math.floor(_pair_with(beta, pairs, base, train_length)), 0), 2 * pairs - 1)
    high = min(max(math.ceil(_pair_with(alpha, pairs, base, train_length)), 0), 2 * pairs - 1)
    index = torch.arange(pairs, dtype=torch.float64, device=inv_freq.device)
    return ((index - low) / (high - low or 0.001)).clamp(0, 1)


def ramp_remarks(kind: Ramp, train_length: int, beta: float) -> list[str]:
    """A warning if the ramp interpolates every pair; otherwise none."""
    if kind == "index" or train_length >= 2 * math.pi * beta:
        return []
    return [
        f"ramp=rotations with beta {beta:g}: no pair makes so many rotations within the training length "
        f"{train_length}, so that all are interpolated, the fastest too; a beta of about "
        f"{0.4 * train_length / (2 * math.pi):.2g} keeps it as it is"
    ]


def clip(inv_freq: Tensor, pairs: int) -> Tensor:
    """Slow the last `pairs` pairs by half a cosine wave: the first of them keeps its frequency, the last one stops."""
    kept = 0.5 + 0.5 * torch.linspace(0, math.pi, pairs, dtype=torch.float64, device=inv_freq.device).cos()
    return torch.cat([inv_freq[: len(inv_freq) - pairs], inv_freq[len(inv_freq) - pairs :] * kept])


def yarn_temperature(factor: float) -> float:
    """YaRN's multiplier of q and k: 0.1·ln s + 1."""
    return 0.1 * math.log(factor) + 1


def longrope_temperature(factor: float, train_length: int) -> float:
    """LongRoPE's multiplier of q and k: sqrt(1 + ln s / ln L)."""
    return math.sqrt(1 + math.log(factor) / math.log(train_length))


def _pair_with(rotations: float, pairs: int, base: float, train_length: int) -> float:
    """The (fractional) index of the pair that makes this many rotations within the training length."""
    return pairs * math.log(train_length / (2 * math.pi * rotations)) / math.log(base)
