"""Extensions of rotary encodings that change frequencies and, in two cases, scale q and k. They add no run time.

Each returns a copy of the encoding with other frequencies. Everything else (a decay, a share of the channels) stays as
trained. If frequencies were learned, the learned ones are stretched.
"""

import functools
import logging
import math

import torch
from torch import Tensor

from posbench.encodings import _frequencies as rules
from posbench.encodings._frequencies import Ramp
from posbench.encodings._rotary import Rotary, frequencies
from posbench.encodings.extend.stretch import Extended, Stretch, expect
from posbench.encodings.partial_rope import PartialRoPE
from posbench.encodings.rope import RoPE

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")


def pi(rope: Rotary, stretch: Stretch, factor: float | None = None) -> Extended:
    """Position interpolation: all frequencies divided by s, so that no angle is larger than in training.

    Source: Chen et al., "Extending Context Window of Large Language Models via Positional Interpolation" (2023),
    arXiv:2306.15595; kaiokendev (2023).
    """
    s, facts = stretch.factor(factor)
    return _rescaled(rope, rules.pi(rope.inv_freq(CPU), s), facts)


def ntk(rope: Rotary, stretch: Stretch, factor: float | None = None) -> Extended:
    """NTK-aware: the base becomes base·s^(d/(d-2)), which keeps the fastest pair and divides the slowest by s.

    Source: bloc97, "NTK-Aware Scaled RoPE" (2023), reddit.com/r/LocalLLaMA.
    """
    s, facts = stretch.factor(factor)
    return _rescaled(rope, rules.ntk(rope.inv_freq(CPU), s), facts)


def dynamic_ntk(rope: Rotary, stretch: Stretch, factor: float = 1.0) -> Extended:
    """NTK-aware with s = factor·length/train_length - (factor - 1) beyond the training length, nothing up to it.

    With factor 1 it is `ntk`, whose s follows the length too.

    Source: emozilla, "Dynamically Scaled RoPE" (2023), reddit.com/r/LocalLLaMA; transformers' rope_type `dynamic`.
    """
    expect(math.isfinite(factor) and factor >= 1, "factor", factor, "a number of at least 1")
    length = torch.tensor(stretch.length, dtype=torch.float64)
    s = rules.dynamic_factor(factor, length, stretch.train_length).item()
    facts: dict[str, object] = {"factor": factor, "dynamic": True, "stretch": s}
    return _rescaled(rope, rules.ntk(rope.inv_freq(CPU), s), facts)


def ntk_by_parts(
    rope: Rotary,
    stretch: Stretch,
    factor: float | None = None,
    ramp: Ramp = "index",
    alpha: float = 1.0,
    beta: float = 32.0,
) -> Extended:
    """NTK-by-parts: pairs with at most alpha rotations in training divided by s, those with beta or more untouched.

    Source: Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models" (2023), arXiv:2309.00071,
    section 3.2; `ramp: index` as their code has it, `rotations` as the paper has it.
    """
    s, facts = stretch.factor(factor)
    facts |= {"ramp": ramp, "alpha": alpha, "beta": beta}
    return _rescaled(rope, _by_parts(rope, stretch, s, ramp, alpha, beta), facts)


def yarn(
    rope: Rotary,
    stretch: Stretch,
    factor: float | None = None,
    ramp: Ramp = "index",
    alpha: float = 1.0,
    beta: float = 32.0,
    attention_factor: float | None = None,
) -> Extended:
    """YaRN: NTK-by-parts, and q and k multiplied by 0.1·ln s + 1, which sharpens attention over more keys.

    Source: Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models" (2023), arXiv:2309.00071;
    `ramp: index` as their code, transformers and vLLM have it, `rotations` as the paper has it.
    """
    s, facts = stretch.factor(factor)
    facts |= {"ramp": ramp, "alpha": alpha, "beta": beta}
    temperature = rules.yarn_temperature(s) if attention_factor is None else attention_factor
    return _rescaled(rope, _by_parts(rope, stretch, s, ramp, alpha, beta), facts, temperature)


def llama3(
    rope: Rotary,
    stretch: Stretch,
    factor: float | None = None,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
) -> Extended:
    """Llama 3.1's: NTK-by-parts with the ramp by rotations, from 1 to 4 of them.

    Source: Grattafiori et al., "The Llama 3 Herd of Models" (2024), arXiv:2407.21783; transformers' rope_type `llama3`.
    """
    s, facts = stretch.factor(factor)
    facts |= {"ramp": "rotations", "low_freq_factor": low_freq_factor, "high_freq_factor": high_freq_factor}
    inv_freq = _by_parts(rope, stretch, s, "rotations", low_freq_factor, high_freq_factor)
    return _rescaled(rope, inv_freq, facts)


def longrope(
    rope: Rotary,
    stretch: Stretch,
    factor: float | None = None,
    long_factor: list[float] | None = None,
    short_factor: list[float] | None = None,
    attention_factor: float | None = None,
) -> Extended:
    """LongRoPE: two divisors per frequency, one beyond the training length and one up to it.

    The authors search the numbers with an evolutionary algorithm. Without that search, `long_factor` holds YaRN's
    divisors and `short_factor` is 1. q and k are multiplied by sqrt(1 + ln s / ln train_length) at every length.

    Source: Ding et al., "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens" (2024), arXiv:2402.13753;
    transformers' rope_type `longrope`, which, as here, leaves out the paper's uninterpolated first tokens.
    """
    s, facts = stretch.factor(factor)
    inv_freq = rope.inv_freq(CPU)
    divisors = {
        "long_factor": (inv_freq / _by_parts(rope, stretch, s, "index", 1.0, 32.0)).nan_to_num(1.0),  # 0 / 0: no turn
        "short_factor": torch.ones_like(inv_freq),
    }
    for option, given in (("long_factor", long_factor), ("short_factor", short_factor)):
        if given is not None:
            fits = len(given) == len(inv_freq) and all(math.isfinite(value) and value > 0 for value in given)
            expect(fits, option, given, f"{len(inv_freq)} numbers above 0, one per pair")
            divisors[option] = torch.tensor(given, dtype=torch.float64)
    chosen = "long_factor" if stretch.length > stretch.train_length else "short_factor"
    temperature = rules.longrope_temperature(s, stretch.train_length) if attention_factor is None else attention_factor
    return _rescaled(rope, inv_freq / divisors[chosen], facts | {"divided_by": chosen}, temperature)


def abf(rope: RoPE | PartialRoPE, stretch: Stretch, base: float = 500_000.0) -> Extended:
    """Adjusted base frequency: a larger base at every length; meant to be followed by training, here without.

    Source: Xiong et al., "Effective Long-Context Scaling of Foundation Models" (2023), arXiv:2309.16039, section 4.1.
    """
    expect(1 < base < math.inf, "base", base, "a number above 1")
    inv_freq = frequencies(rope.width, base, CPU)
    return _rescaled(rope, inv_freq, {"base": base, "dynamic": False})


def clipped_rope(rope: Rotary, stretch: Stretch, pairs: int | None = None) -> Extended:
    """Clipped RoPE (its authors' "CoPE"): pairs slower than the training length are slowed, the last one to a halt.

    The factor falls as half a cosine wave over the last `pairs` pairs, by default those whose period exceeds the
    training length. The authors' code, made for one model, always takes 20 of 64. It ignores the length.

    Source: Li et al., "CoPE: Clipped RoPE as A Scalable Free Lunch for Long Context LLMs" (2026), arXiv:2602.05258;
    github.com/hrlics/CoPE.
    """
    inv_freq = rope.inv_freq(CPU)
    slow = int((2 * math.pi / inv_freq > stretch.train_length).sum()) if pairs is None else pairs
    expect(0 <= slow <= len(inv_freq), "pairs", slow, f"a number of pairs from 0 to {len(inv_freq)}")
    return _rescaled(rope, rules.clip(inv_freq, slow), {"pairs": slow, "dynamic": False})


def _rescaled(rope: Rotary, inv_freq: Tensor, facts: dict[str, object], attention_factor: float = 1.0) -> Extended:
    expect(math.isfinite(attention_factor) and attention_factor > 0, "attention_factor", attention_factor, "above 0")
    facts = facts | {
        "attention_factor": attention_factor,
        "inv_freq_before": _six_digits(rope.inv_freq(CPU)),
        "inv_freq_after": _six_digits(inv_freq),
    }
    return rope.rescaled(inv_freq, attention_factor), facts


def _by_parts(rope: Rotary, stretch: Stretch, s: float, ramp: Ramp, alpha: float, beta: float) -> Tensor:
    expect(0 < alpha < beta < math.inf, "alpha, beta", f"{alpha:g}, {beta:g}", "0 < alpha < beta")
    for remark in rules.ramp_remarks(ramp, stretch.train_length, beta):
        _say(remark)
    inv_freq = rope.inv_freq(CPU)
    return rules.by_parts(inv_freq, s, rules.ramp(ramp, inv_freq, rope.base, stretch.train_length, alpha, beta))


@functools.cache  # once, though a method runs again for every length
def _say(remark: str) -> None:
    logger.warning("%s", remark)


def _six_digits(inv_freq: Tensor) -> list[float]:
    return [float(f"{value:.6g}") for value in inv_freq.tolist()]
