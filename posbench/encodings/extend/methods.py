"""The table of extension methods, and applying one of them to an encoding."""

import dataclasses
import functools
import importlib
import inspect
import typing
from collections.abc import Callable
from typing import Any

from posbench.encodings._wrapper import Wrapper
from posbench.encodings.base import Encoding
from posbench.encodings.extend import NAMES
from posbench.encodings.extend.stretch import Stretch
from posbench.errors import Undefined, UserError, unknown
from posbench.options import checked


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to extend an encoding: `apply(encoding, stretch, **options)` gives the extended one and its facts."""

    name: str
    title: str  # one line
    source: str
    apply: Callable[..., tuple[Encoding, dict[str, Any]]]

    @functools.cached_property
    def accepts(self) -> Any:
        """The class of encodings, or the union of classes, that it can extend."""
        return next(iter(typing.get_type_hints(self.apply).values()))

    @property
    def options(self) -> dict[str, Any]:
        """Its options with their defaults."""
        return {p.name: p.default for p in list(inspect.signature(self.apply).parameters.values())[2:]}


def _method(apply: Callable[..., Any]) -> Method:
    text = inspect.cleandoc(apply.__doc__ or "")
    source = text.partition("Source: ")[2].partition("\n\n")[0]
    return Method(apply.__name__, text.partition("\n")[0].rstrip("."), " ".join(source.split()), apply)


METHODS: dict[str, Method] = {
    name: _method(getattr(importlib.import_module(f"posbench.encodings.extend.{module}"), name))
    for name, module in NAMES.items()
}


def methods_of(encoding: Encoding) -> list[str]:
    """Names of the methods that can extend an encoding or one of its inner encodings."""
    if isinstance(encoding, Wrapper):
        able = {name for inner in encoding.inner_encodings for name in methods_of(inner)}
        return [name for name in METHODS if name in able]
    return [method.name for method in METHODS.values() if isinstance(encoding, method.accepts)]


def extended(
    encoding: Encoding, method: str, length: int, train_length: int, **options: Any
) -> tuple[Encoding, dict[str, Any]]:
    """Make a trained encoding reach `length` tokens.

    Args:
        encoding: the trained encoding; it is not changed.
        method: a name of `METHODS`.
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
    if method not in METHODS:
        raise unknown("extension", method, METHODS, "'posbench list' shows all")
    hints = typing.get_type_hints(METHODS[method].apply)
    options = checked(options, hints, METHODS[method].options, method)
    return _extended(encoding, METHODS[method], Stretch(train_length, length), options)


def _extended(
    encoding: Encoding, method: Method, stretch: Stretch, options: dict[str, Any]
) -> tuple[Encoding, dict[str, Any]]:
    able = methods_of(encoding)
    if method.name not in able:
        raise Undefined(f"'{encoding.name}' has no extension '{method.name}': it supports {', '.join(able) or 'none'}")
    if isinstance(encoding, Wrapper):
        return _handed_on(encoding, method, stretch, options)
    try:
        made, facts = method.apply(encoding, stretch, **options)
    except UserError as error:
        if options:
            raise
        raise Undefined(str(error)) from None  # no option was given: a default does not fit this model
    made.name, made.window = encoding.name, encoding.window
    return made, facts


def _handed_on(
    wrapper: Wrapper, method: Method, stretch: Stretch, options: dict[str, Any]
) -> tuple[Encoding, dict[str, Any]]:
    """A copy of the wrapper around extended encodings; those that do not support the method are unchanged."""
    inners: list[Encoding] = []
    facts: dict[str, dict[str, Any]] = {}
    for number, inner in enumerate(wrapper.inner_encodings):
        if method.name in methods_of(inner):
            known = wrapper.reached(inner, stretch)
            inner, facts[f"{inner.name} {number}"] = _extended(inner, method, known, options)
        inners.append(inner)
    return wrapper.around(inners), {"dynamic": any(one["dynamic"] for one in facts.values()), "extended": facts}
