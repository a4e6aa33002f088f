"""Context extension: a trained encoding made to reach beyond its training length, without further training.

A method returns a new encoding that shares the trained one's parameters; the trained one is not changed. The annotation
of its first parameter lists the encodings that it supports. A wrapper applies it to those of its inner encodings. A
factor s is length / train_length by default (dynamic: nothing changes up to the training length). A fixed s gives the
same model at every length, at a price at the training length too.
"""

import dataclasses
import functools
import importlib
import inspect
import math
import re
import typing
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from posbench.encodings import EXTENSIONS
from posbench.encodings.base import Encoding, Extended, Stretch
from posbench.encodings.rope import CPU, SCALINGS, PartialRoPE, RoPE, Rotary, Rule, Spectrum, frequencies
from posbench.encodings.wrapper import Wrapper
from posbench.errors import Undefined, UserError, unknown
from posbench.options import Above1, AtLeast1, Offset, checked


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to extend an encoding: `apply(encoding, stretch, **options)` gives the extended one and its facts."""

    name: str
    title: str  # one line
    source: str
    accepts: Any  # the class of encodings, or the union of classes, that it can extend
    options: dict[str, Any]  # with their defaults
    hints: dict[str, Any]  # annotations of the options
    apply: Callable[..., Extended]


@functools.cache
def methods() -> dict[str, Method]:
    """Return all methods by name."""
    return {name: _method(name, module) for name, module in EXTENSIONS.items()}


def _method(name: str, module: str) -> Method:
    function = getattr(importlib.import_module(f"posbench.encodings.{module}"), name)
    parameters, hints = inspect.signature(function).parameters, typing.get_type_hints(function, include_extras=True)
    options = {key: each.default for key, each in parameters.items() if each.default is not each.empty}
    accepts, apply = next(iter(hints.values())), function
    if name in SCALINGS:
        accepts, apply = Rotary, functools.partial(_scaled, function)
        if name != "dynamic_ntk":  # which follows the length by itself
            options["factor"], hints["factor"] = None, AtLeast1 | None
    text = inspect.cleandoc(function.__doc__ or "")
    title, source = text.partition("\n")[0].rstrip("."), re.split(r"\nBeyond|\n\n", text.partition("Source: ")[2])[0]
    return Method(name, title, " ".join(source.split()), accepts, options, hints, apply)


def methods_of(encoding: Encoding) -> list[str]:
    """Return the names of the methods that can extend an encoding or one of its inner encodings."""
    if isinstance(encoding, Wrapper):
        able = {name for inner in encoding.inner_encodings for name in methods_of(inner)}
        return [name for name in methods() if name in able]
    return [method.name for method in methods().values() if isinstance(encoding, method.accepts)]


def extended(encoding: Encoding, method: str, length: int, train_length: int, **options: Any) -> Extended:
    """Make a trained encoding reach `length` tokens.

    Args:
        encoding: the trained encoding; it is not changed.
        method: a name of `methods`.
        length: the length to be evaluated, in tokens.
        train_length: the length of training, in tokens.
        options: of the method, checked against its signature.

    Returns:
        The extended encoding, which shares the trained one's parameters, and the facts of the extension: the factor,
        whether it follows the length (`dynamic`), ramp, attention factor, frequencies before and after.

    Raises:
        UserError: unknown method, or an option that is wrong, also for this encoding or this length.
        Undefined: the encoding does not support the method, or its defaults do not fit this encoding.
    """
    if method not in methods():
        raise unknown("extension", method, methods(), "'posbench list' shows all")
    chosen = methods()[method]
    options = checked(options, chosen.hints, chosen.options, method)
    return _extended(encoding, chosen, Stretch(train_length, length), options)


def _extended(encoding: Encoding, method: Method, stretch: Stretch, options: dict[str, Any]) -> Extended:
    able = methods_of(encoding)
    if method.name not in able:
        raise Undefined(f"'{encoding.name}' has no extension '{method.name}': it supports {', '.join(able) or 'none'}")
    if isinstance(encoding, Wrapper):
        return _handed_on(encoding, method, stretch, options)
    try:
        copied, facts = method.apply(encoding, stretch, **options)
    except UserError as error:
        if options:
            raise
        raise Undefined(str(error)) from None  # no option was given: a default does not fit this model
    copied.name, copied.window = encoding.name, encoding.window
    return copied, facts


def _handed_on(wrapper: Wrapper, method: Method, stretch: Stretch, options: dict[str, Any]) -> Extended:
    """Return a copy of the wrapper around extended encodings; those that do not support the method are unchanged."""
    inners: list[Encoding] = []
    facts: dict[str, dict[str, Any]] = {}
    for number, inner in enumerate(wrapper.inner_encodings):
        if method.name in methods_of(inner):
            reached = wrapper.reached(inner, stretch)
            inner, facts[f"{inner.name} {number}"] = _extended(inner, method, reached, options)
        inners.append(inner)
    return wrapper.around(inners), {"dynamic": any(each["dynamic"] for each in facts.values()), "extended": facts}


# -- of rotary encodings: other frequencies, and everything else (a decay, a share of the channels) as trained ---------


def _scaled(rule: Rule, rope: Rotary, stretch: Stretch, **options: Any) -> Extended:
    """Apply a scaling. If frequencies were learned, the learned ones are scaled."""
    factor, facts = stretch.factor((methods()[rule.__name__].options | options)["factor"])
    length = torch.tensor(stretch.length, dtype=torch.float64)
    spectrum = Spectrum(rope.inv_freq(CPU), rope.base, stretch.train_length, length, stretch.expect)
    scaled = rule(spectrum, **options | {"factor": factor})
    return _rescaled(rope, scaled.f, facts | dict(scaled.facts), scaled.attention_factor)


def abf(rope: RoPE | PartialRoPE, stretch: Stretch, base: Above1 = 500_000.0) -> Extended:
    """Adjusted base frequency: a larger base at every length; meant to be followed by training, here without.

    Source: Xiong et al., "Effective Long-Context Scaling of Foundation Models" (2023), arXiv:2309.16039, section 4.1.
    """
    return _rescaled(rope, frequencies(rope.width, base), {"base": base, "dynamic": False})


def clipped_rope(rope: Rotary, stretch: Stretch, pairs: Offset | None = None) -> Extended:
    """Clipped RoPE (its authors' "CoPE"): pairs slower than the training length are slowed, the last one to a halt.

    The factor falls as half a cosine wave over the last `pairs` pairs, by default those whose period exceeds the
    training length. The authors' code, made for one model, always takes 20 of 64. It ignores the length.

    Source: Li et al., "CoPE: Clipped RoPE as A Scalable Free Lunch for Long Context LLMs" (2026), arXiv:2602.05258;
    github.com/hrlics/CoPE.
    """
    inv_freq = rope.inv_freq(CPU)
    slow = int((2 * math.pi / inv_freq > stretch.train_length).sum()) if pairs is None else pairs
    stretch.expect(slow <= len(inv_freq), "pairs", slow, f"a number of pairs from 0 to {len(inv_freq)}")
    wave = 0.5 + 0.5 * torch.linspace(0, math.pi, slow, dtype=torch.float64).cos()
    fast = torch.ones(len(inv_freq) - slow, dtype=torch.float64)
    return _rescaled(rope, inv_freq * torch.cat((fast, wave)), {"pairs": slow, "dynamic": False})


def _rescaled(rope: Rotary, inv_freq: Tensor, facts: dict[str, Any], attention_factor: float = 1.0) -> Extended:
    before, after = ([float(f"{f:.6g}") for f in each.tolist()] for each in (rope.inv_freq(CPU), inv_freq))
    facts = facts | {"attention_factor": attention_factor, "inv_freq_before": before, "inv_freq_after": after}
    return rope.rescaled(inv_freq, attention_factor), facts
