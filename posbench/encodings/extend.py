"""Context extension: a trained encoding made to reach beyond its training length, without further training.

The annotation of a method's first parameter lists the encodings that it supports. A wrapper applies it to those of its
inner encodings. A factor s is length / train_length by default (dynamic: nothing changes up to the training length).
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

from posbench.encodings import EXTENSIONS
from posbench.encodings.base import Encoding, Extended, Stretch, expect
from posbench.encodings.rope import Rotary, Scaling, Spectrum
from posbench.encodings.wrapper import Wrapper
from posbench.errors import OptionError, Undefined, unknown
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
    hints = typing.get_type_hints(function, include_extras=True)
    parameters = list(inspect.signature(function).parameters.values())
    options = {each.name: each.default for each in parameters if each.default is not each.empty}
    accepts, apply = next(iter(hints.values())), function
    if accepts is Spectrum:
        accepts, apply = Rotary, functools.partial(_scaled, function)
        if "factor" in options and name != "dynamic_ntk":  # which follows the length by itself
            options["factor"], hints["factor"] = None, AtLeast1 | None
    title, _, text = inspect.cleandoc(function.__doc__ or "").partition("\n")
    source = re.split(r"\nBeyond|\n\n", text.partition("Source: ")[2])[0]
    return Method(name, title.rstrip("."), " ".join(source.split()), accepts, options, hints, apply)


def methods_of(encoding: Encoding) -> list[str]:
    """Return the names of the methods that can extend an encoding or one of its inner encodings."""
    if isinstance(encoding, Wrapper):
        able = {name for inner in encoding.inner_encodings for name in methods_of(inner)}
        return [name for name in methods() if name in able]
    return [method.name for method in methods().values() if isinstance(encoding, method.accepts)]


def extended(encoding: Encoding, method: str, length: int, train_length: int, **options: Any) -> Extended:
    """Return a trained encoding made to reach `length` tokens, sharing its parameters, and the facts of the extension.

    Raises:
        UserError: unknown method, or an option that is wrong, also for this encoding or this length.
        Undefined: the encoding does not support the method.
    """
    if method not in methods():
        raise unknown("extension", method, methods(), "'posbench list' shows all")
    options = checked(options, methods()[method].hints, methods()[method].options, method)
    return _extended(encoding, methods()[method], Stretch(train_length, length), options)


def _extended(encoding: Encoding, method: Method, stretch: Stretch, options: dict[str, Any]) -> Extended:
    able = methods_of(encoding)
    if method.name not in able:
        raise Undefined(f"'{encoding.name}' has no extension '{method.name}': it supports {', '.join(able) or 'none'}")
    if isinstance(encoding, Wrapper):  # inner encodings that do not support the method stay as they are
        inners, facts = encoding.inner_encodings, {}
        for number, inner in enumerate(inners):
            if method.name in methods_of(inner):
                reached = encoding.reached(inner, stretch)
                inners[number], facts[f"{inner.name} {number}"] = _extended(inner, method, reached, options)
        return encoding.around(inners), {"dynamic": any(each["dynamic"] for each in facts.values()), "extended": facts}
    try:
        copied, facts = method.apply(encoding, stretch, **method.options | options)
    except OptionError as error:
        raise error.under("extension") from None
    copied.name, copied.window = encoding.name, encoding.window
    return copied, facts


# -- of rotary encodings: other frequencies, and everything else (a decay, a share of the channels) as trained ---------


def _scaled(rule: Callable[..., Scaling], rope: Rotary, stretch: Stretch, **options: Any) -> Extended:
    """Apply a rule to the trained frequencies, the learned ones if they were learned."""
    dynamic = rule.__name__ == "dynamic_ntk" or options.get("factor", 1.0) is None
    if "factor" in options:
        options["factor"] = stretch.factor(options["factor"])[0]
    length = torch.tensor(stretch.length, dtype=torch.float64)
    f, attention_factor = rule(Spectrum(rope.inv_freq(), rope.base, stretch.train_length, length), **options)
    before, after = ([float(f"{number:.6g}") for number in each.tolist()] for each in (rope.inv_freq(), f))
    facts = {"dynamic": dynamic, "attention_factor": attention_factor, "inv_freq_before": before}
    return rope.rescaled(f, attention_factor), {**options, **facts, "inv_freq_after": after}


def abf(rope: Spectrum, base: Above1 = 500_000.0) -> Scaling:
    """Adjusted base frequency: a larger base at every length; meant to be followed by training, here without.

    Source: Xiong et al., "Effective Long-Context Scaling of Foundation Models" (2023), arXiv:2309.16039, section 4.1.
    """
    pair = torch.arange(len(rope.f), dtype=torch.float64)
    return rope.f * (base / rope.base) ** (-pair / len(rope.f)), 1.0


def clipped_rope(rope: Spectrum, pairs: Offset | None = None) -> Scaling:
    """Clipped RoPE (its authors' "CoPE"): pairs slower than the training length are slowed, the last one to a halt.

    The factor falls as half a cosine wave over the last `pairs` pairs, by default those with a longer period.

    Source: Li et al., "CoPE: Clipped RoPE as A Scalable Free Lunch for Long Context LLMs" (2026), arXiv:2602.05258.
    """
    slow = int((2 * math.pi / rope.f > rope.train_length).sum()) if pairs is None else pairs
    expect(slow <= len(rope.f), "pairs", slow, f"a number of pairs from 0 to {len(rope.f)}")
    wave = 0.5 + 0.5 * torch.linspace(0, math.pi, slow, dtype=torch.float64).cos()
    return rope.f * torch.cat((torch.ones(len(rope.f) - slow, dtype=torch.float64), wave)), 1.0
