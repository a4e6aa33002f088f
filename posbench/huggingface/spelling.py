"""`rope_parameters`: how transformers spells rotary encodings, whether trained so or extended later.

A base is RoPE's, at which its slowest pair turns; an original length is that of training, in tokens.
"""

from typing import Any

from torch import Tensor

Parameters = dict[str, Any]


def earlier(kind: str, parameters: Parameters) -> dict[str, Any]:
    """The same parameters by the keys that transformers 4 reads, which passes over `rope_parameters`.

    `rope_scaling` has all keys: transformers 5 takes it in place of `rope_parameters` where both are there.

    Args:
        kind: transformers' model_type.
    """
    theta, plain = parameters["rope_theta"], parameters["rope_type"] == "default"
    keys: dict[str, Any] = {"rope_theta": theta, "rope_scaling": None if plain else parameters}
    if kind == "gpt_neox":
        keys |= {"rotary_emb_base": theta, "rotary_pct": parameters["partial_rotary_factor"]}
    if parameters["rope_type"] == "longrope":  # version 4 looks for it beside rope_scaling, not within
        keys["original_max_position_embeddings"] = parameters["original_max_position_embeddings"]
    return keys


def default(base: float) -> Parameters:
    return {"rope_type": "default", "rope_theta": base}


def proportional(base: float, fraction: float) -> Parameters:
    """Frequencies of a whole head, of which only this share turns."""
    return {"rope_type": "proportional", "rope_theta": base, "partial_rotary_factor": fraction}


def linear(base: float, factor: float) -> Parameters:
    return {"rope_type": "linear", "rope_theta": base, "factor": factor}


def larger_base(base: float, factor: float, width: int) -> Parameters:
    """NTK: the base by which the slowest of `width` channels turns slower by the factor."""
    return default(base * factor ** (width / max(1, width - 2)))


def dynamic(base: float, factor: float) -> Parameters:
    return {"rope_type": "dynamic", "rope_theta": base, "factor": factor}


def yarn(base: float, factor: float, *, slow: float, fast: float, attention_factor: float, original: int) -> Parameters:
    """Pairs that turn fewer than `slow` times in the original length are stretched, those beyond `fast` are not."""
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
    """As `yarn`, with a ramp over rotations instead of pairs, and logits as they are."""
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
    """Frequencies of RoPE divided one by one (pairs,): up to the original length by `short`, beyond it by `long`."""
    return {
        "rope_type": "longrope",
        "rope_theta": base,
        "factor": factor,
        "short_factor": short.tolist(),
        "long_factor": long.tolist(),
        "attention_factor": attention_factor,
        "original_max_position_embeddings": original,
    }
