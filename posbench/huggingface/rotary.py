"""posbench's rotary encodings in transformers' terms: `rope_parameters`, and the order of a head's channels.

transformers pairs channel p with p + w/2 of the w rotated channels. posbench pairs (2p, 2p+1) by default, or as
transformers does; if only some channels turn, they come first. Rows of the query and key projections are permuted alike
into transformers' order, which changes no logit.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from posbench.encodings import _rotary as rotary
from posbench.encodings._rotary import Rotary
from posbench.encodings.base import Encoding
from posbench.encodings.dynamic_ntk import DynamicNTK
from posbench.encodings.lerope import LeRoPE
from posbench.encodings.llama3 import Llama3
from posbench.encodings.longrope import LongRoPE
from posbench.encodings.ntk import NTK
from posbench.encodings.ntk_by_parts import NTKByParts
from posbench.encodings.p_rope import PRoPE
from posbench.encodings.partial_rope import PartialRoPE
from posbench.encodings.pi import PI
from posbench.encodings.rope import RoPE
from posbench.encodings.yarn import YaRN
from posbench.huggingface import spelling
from posbench.huggingface.spelling import Parameters

# No pair turns: attention without positions, in architectures that have only rotary encodings.
NO_POSITIONS = spelling.proportional(10000.0, 0.0)


def expressible(encoding: Encoding) -> bool:
    """Whether transformers has this rotary encoding. False for subclasses and altered copies, which may differ."""
    return type(encoding) in _SPELT and "rotate" not in vars(encoding)


def parameters_of(rope: Encoding, partly: bool) -> Parameters:
    """The `rope_parameters` of an encoding that transformers can express.

    Args:
        partly: the architecture can rotate only the first channels of a head, as GPT-NeoX does.
    """
    spelt = _SPELT[type(rope)](cast(Any, rope))
    if isinstance(rope, PartialRoPE) and rope.width and not partly:
        # As the fast frequencies of the whole head; the slow ones are 0: base^(-2p/r) = (base^(d/r))^(-2p/d).
        theta = rope.base ** (rope.shape.head_dim / rope.width)
        return spelt | {"rope_type": "proportional", "rope_theta": theta}
    return {"partial_rotary_factor": 1.0, **spelt} if partly else spelt  # GPT-NeoX's own default is a quarter


def order_of(rope: Encoding, partly: bool) -> Tensor:
    """For each channel in transformers' order, its index in posbench: (head_dim,)."""
    rope = cast(Rotary, rope)
    turning, still = torch.arange(rope.width), torch.arange(rope.width, rope.shape.head_dim)
    pairs = turning.view(-1, 2).T if rope.layout == "interleaved" else turning.view(2, -1)
    if partly:
        return torch.cat((pairs.flatten(), still))
    return torch.cat((pairs, still.view(2, -1)), dim=1).flatten()


def _partial(rope: PartialRoPE) -> Parameters:
    return {**spelling.default(rope.base), "partial_rotary_factor": rope.fraction} if rope.width else NO_POSITIONS


def _by_parts(rope: NTKByParts) -> Parameters:
    length = rope.shape.train_length
    if rope.ramp == "rotations" and rope.attention_factor == 1:
        return spelling.llama3(rope.base, rope.factor, slow=rope.alpha, fast=rope.beta, original=length)
    if rope.ramp == "rotations":
        return _listed(rope)
    return spelling.yarn(
        rope.base,
        rope.factor,
        slow=rope.alpha,
        fast=rope.beta,
        attention_factor=rope.attention_factor,
        original=length,
    )


def _llama3(rope: Llama3) -> Parameters:
    slow, fast, length = rope.low_freq_factor, rope.high_freq_factor, rope.shape.train_length
    return spelling.llama3(rope.base, rope.factor, slow=slow, fast=fast, original=length)


def _longrope(rope: LongRoPE) -> Parameters:
    return spelling.longrope(
        rope.base,
        rope.factor,
        short=torch.ones(len(rope.short)),
        long=rope.short / rope.inv_freq(_CPU),
        attention_factor=rope.attention_factor,
        original=rope.original_length,
    )


def _listed(rope: Rotary) -> Parameters:
    """Express any frequencies above 0 as LongRoPE's divisors, the same at every length."""
    divisors = rotary.frequencies(rope.width, rope.base, _CPU) / rope.inv_freq(_CPU)
    return spelling.longrope(
        rope.base,
        1.0,
        short=divisors,
        long=divisors,
        attention_factor=rope.attention_factor,
        original=rope.shape.train_length,
    )


_CPU = torch.device("cpu")
_SPELT: dict[type[Encoding], Callable[[Any], Parameters]] = {
    RoPE: lambda rope: spelling.default(rope.base),
    PartialRoPE: _partial,
    PRoPE: lambda rope: spelling.proportional(rope.base, rope.fraction),
    PI: lambda rope: spelling.linear(rope.base, rope.factor),
    NTK: lambda rope: spelling.larger_base(rope.base, rope.factor, rope.shape.head_dim),
    NTKByParts: _by_parts,
    YaRN: _by_parts,
    Llama3: _llama3,
    LongRoPE: _longrope,
    DynamicNTK: lambda rope: spelling.dynamic(rope.base, rope.factor),
    LeRoPE: _listed,
}
