"""The `rope_parameters` of transformers, for encodings and extensions of posbench."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from posbench.encodings.rope import Rotary, frequencies
from posbench.errors import Undefined

# The encoding `none` in architectures that have only rotary encodings: no pair of
# channels turns.
_NO_POSITIONS = {
    "rope_type": "proportional",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.0,
}


def parameters_of(rope: Rotary | None) -> dict[str, Any]:
    """Return the `rope_parameters` of an encoding."""
    if rope is None or rope.width == 0:
        return _NO_POSITIONS
    if rope.name in ("p_rope", "partial_rope"):
        # Partial RoPE's are written as the whole head's fast frequencies, with 0 for
        # its slow ones: base^(-2p/r) = (base^(d/r))^(-2p/d).
        theta = rope.base
        if rope.name == "partial_rope":
            theta = rope.base ** (rope.shape.head_dim / rope.width)
        return {
            "rope_type": "proportional",
            "rope_theta": theta,
            "partial_rotary_factor": cast(Any, rope).fraction,
        }
    options = {**vars(rope), "attention_factor": rope.attention_factor}
    original = options.get("original_length", rope.shape.train_length)
    long = rope.inv_freq(original + 1)
    short = rope.inv_freq(original)
    return rope_parameters(rope.name, options, rope, long, short, original)


def rope_parameters(
    name: str,
    options: Mapping[str, Any],
    rope: Rotary,
    long: Tensor,
    short: Tensor,
    original: int,
) -> dict[str, Any]:
    """Return the `rope_parameters` of a rotary encoding or of an extension of one;
    Undefined if a pair comes to a halt.

    Args:
        rope: the encoding that gives the base and the width.
        long, short: radians per position of each pair, for inputs above and up to the
            original length.
    """
    plain: dict[str, Any] = {"rope_type": "default", "rope_theta": rope.base}
    factor = options.get("factor")
    scale = options.get("attention_factor")
    stretched = plain | {"factor": factor, "original_max_position_embeddings": original}

    if name == "rope" and options.get("frequencies", "geometric") == "geometric":
        return plain
    if name == "abf":
        return plain | {"rope_theta": options["base"]}
    if name == "ntk":
        exponent = rope.width / max(1, rope.width - 2)
        return plain | {"rope_theta": rope.base * options["factor"] ** exponent}
    if name == "pi":
        return plain | {"rope_type": "linear", "factor": factor}
    if name == "dynamic_ntk":
        return plain | {"rope_type": "dynamic", "factor": factor}
    if name in ("yarn", "ntk_by_parts") and options["ramp"] == "index":
        return stretched | {
            "rope_type": "yarn",
            "beta_slow": options["alpha"],
            "beta_fast": options["beta"],
            "attention_factor": scale,
        }
    if name == "ntk_by_parts":
        return stretched | {
            "rope_type": "llama3",
            "low_freq_factor": options["alpha"],
            "high_freq_factor": options["beta"],
        }
    if name == "llama3":
        return stretched | {
            "rope_type": "llama3",
            "low_freq_factor": options["low_freq_factor"],
            "high_freq_factor": options["high_freq_factor"],
        }
    if not bool((torch.minimum(long, short) > 0).all()):
        raise Undefined(
            f"transformers has no configuration for '{name}': a pair comes to a halt"
        )
    # LongRoPE can express any frequencies, by a divisor for each pair
    base = frequencies(rope.width, rope.base)
    return stretched | {
        "rope_type": "longrope",
        "short_factor": (base / short).tolist(),
        "long_factor": (base / long).tolist(),
        "attention_factor": scale,
    }
