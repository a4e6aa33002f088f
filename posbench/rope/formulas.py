"""What papers say of the types of RoPE, beside what the library computes.

`default`: Su et al. (2021), 2104.09864. `linear`: Chen et al. (2023), 2306.15595.
`dynamic`: emozilla (2023), and HunYuan's `alpha`. `yarn`: Peng et al. (2023),
2309.00071. `longrope`: Ding et al. (2024), 2402.13753. `llama3`: Grattafiori et al.
(2024), 2407.21783. `proportional`: Barbero et al. (2024), 2410.06205.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from posbench.encodings.rope import SCALINGS, Spectrum, frequencies


def by_its_paper(
    parameters: Mapping[str, Any],
    n_pairs: int,
    original: int,
    longest: int,
    length: int,
) -> tuple[Tensor, float]:
    """Return the radians per position of each pair, (P,) fp64, and the factor on q and
    k, of some `rope_parameters` for an input of a length.

    Args:
        original: the trained length, before any stretching.
        longest: the configuration's own length.
    """
    given = {key: value for key, value in parameters.items() if value is not None}
    type_ = given["rope_type"]
    base = float(given["rope_theta"])
    f = frequencies(2 * n_pairs, base)
    factor = given.get("factor") or longest / original

    if type_ == "linear":
        return f / factor, 1.0
    if type_ == "proportional":
        share = given.get("partial_rotary_factor", 1.0)
        return SCALINGS["p_rope"](_spectrum(f, base, 0, 0), share)
    if type_ == "dynamic" and "alpha" in given:
        return SCALINGS["ntk"](_spectrum(f, base, 0, 0), given["alpha"])
    if type_ == "dynamic":
        return SCALINGS["dynamic_ntk"](_spectrum(f, base, original, length), factor)
    if type_ == "llama3":
        low, high = given["low_freq_factor"], given["high_freq_factor"]
        return SCALINGS["llama3"](
            _spectrum(f, base, original, length), factor, low, high
        )
    if type_ == "longrope":
        name = "long" if length > original else "short"
        grown = max(factor, 1)
        scale = math.sqrt(1 + math.log(grown) / math.log(original))
        scale = given.get(f"{name}_mscale", scale)
        divisors = torch.tensor(given[f"{name}_factor"], dtype=torch.float64)
        return f / divisors, given.get("attention_factor", scale)
    if type_ == "yarn":
        return _yarn(given, f, base, original, factor)
    return f, 1.0


def _spectrum(f: Tensor, base: float, original: int, length: int) -> Spectrum:
    return Spectrum(f, base, original, torch.tensor(float(length)))


def _yarn(
    given: Mapping[str, Any], f: Tensor, base: float, original: int, factor: float
) -> tuple[Tensor, float]:
    def pair_of(rotations: float) -> float:
        """Return the pair that turns so often within the original length."""
        turns_of_first = original / (2 * math.pi)
        return len(f) * math.log(turns_of_first / rotations) / math.log(base)

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(max(factor, 1)) + 1

    first = pair_of(given.get("beta_fast") or 32)
    last = pair_of(given.get("beta_slow") or 1)
    if given.get("truncate", True):
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, 2 * len(f) - 1)
    p = torch.arange(len(f), dtype=torch.float64)
    slowed = ((p - first) / (last - first or 0.001)).clamp(0, 1)

    scale = temperature(1)
    if given.get("mscale") and given.get("mscale_all_dim"):
        scale = temperature(given["mscale"]) / temperature(given["mscale_all_dim"])
    return f * (slowed / factor + 1 - slowed), given.get("attention_factor", scale)
