"""`rope_parameters`: the rotary encodings of transformers, both trained and extended ones.

`base` is RoPE's base; `original` is the training length in tokens.
"""

from typing import Any

from torch import Tensor

Parameters = dict[str, Any]


def default(base: float) -> Parameters:
    return {"rope_type": "default", "rope_theta": base}


def proportional(base: float, fraction: float) -> Parameters:
    """Frequencies of a whole head; only this share of the pairs turns."""
    return {"rope_type": "proportional", "rope_theta": base, "partial_rotary_factor": fraction}


def linear(base: float, factor: float) -> Parameters:
    return {"rope_type": "linear", "rope_theta": base, "factor": factor}


def larger_base(base: float, factor: float, width: int) -> Parameters:
    """NTK: the base that slows the slowest pair of `width` channels by the factor."""
    return default(base * factor ** (width / max(1, width - 2)))


def dynamic(base: float, factor: float) -> Parameters:
    return {"rope_type": "dynamic", "rope_theta": base, "factor": factor}


def yarn(base: float, factor: float, *, slow: float, fast: float, attention_factor: float, original: int) -> Parameters:
    """Pairs with fewer than `slow` rotations in the original length are stretched, those with over `fast` are not."""
    return {
        "rope_type": "yarn",
        "rope_theta": base,
        "factor": factor,
        "beta_slow": slow,
        "beta_fast": fast,
        "attention_factor": attention_factor,
        "original_max_position_embeddings": original,
    }


def llama3(base: float, factor: float, *, slow: float, fast: float, original: int) -> Parameters:
    """Like `yarn`, but with a ramp over rotations instead of pairs and without a temperature."""
    return {
        "rope_type": "llama3",
        "rope_theta": base,
        "factor": factor,
        "low_freq_factor": slow,
        "high_freq_factor": fast,
        "original_max_position_embeddings": original,
    }


def longrope(
    base: float, factor: float, *, short: Tensor, long: Tensor, attention_factor: float, original: int
) -> Parameters:
    """RoPE with each frequency divided by `short` (pairs,) up to the original length, by `long` (pairs,) beyond it."""
    return {
        "rope_type": "longrope",
        "rope_theta": base,
        "factor": factor,
        "short_factor": short.tolist(),
        "long_factor": long.tolist(),
        "attention_factor": attention_factor,
        "original_max_position_embeddings": original,
    }
