"""The registry of encodings: the folder is the list. `<name>.py` here is an encoding; a leading underscore is not.

Encodings from elsewhere join through the entry point group `posbench.encodings` (name -> class).
"""

import functools
import importlib
import importlib.metadata
import inspect
import sys
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from posbench.errors import OptionError, UserError, did_you_mean

if TYPE_CHECKING:
    from posbench.encodings.base import Encoding, Shape

_GROUP = "posbench.encodings"


def names() -> list[str]:
    """Names of all encodings, sorted. Imports none of them."""
    files = (path.stem for path in Path(__file__).parent.glob("*.py"))
    own = {stem for stem in files if not stem.startswith("_") and stem != "base"}
    return sorted(own | set(_installed()))


def load(name: str) -> "type[Encoding]":
    """The class of an encoding.

    Raises:
        UserError: no encoding of that name.
    """
    from posbench.encodings.base import Encoding

    if name not in names():
        raise UserError(f"unknown encoding '{name}'{did_you_mean(name, names())} ('posbench list' shows all)")
    if name in _installed():
        cls = _installed()[name].load()
        if not (isinstance(cls, type) and issubclass(cls, Encoding)):
            raise UserError(f"the installed encoding '{name}' is {cls!r}: expected a subclass of posbench's Encoding")
        cls.name = name
        return cls
    module = importlib.import_module(f"{__name__}.{name}")
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Encoding) and value.__module__ == module.__name__
    ]
    if len(classes) != 1:
        raise UserError(f"encodings/{name}.py defines {len(classes)} Encoding classes: expected exactly one")
    return classes[0]


def options_of(name: str) -> dict[str, Any]:
    """An encoding's options with their defaults, as the constructor declares them."""
    return {p.name: p.default for p in _parameters(load(name))}


def reject_option(name: str, option: str) -> NoReturn:
    """Say that an encoding has no such option, what it accepts, and which one or which encoding may be meant.

    Raises:
        UserError: always.
    """
    accepted = list(options_of(name))
    accepts = f"it accepts {', '.join(accepted)}" if accepted else "it accepts none"
    raise UserError(f"'{name}' has no option '{option}': {accepts}{_owner(option, name, accepted)}")


def build(name: str, shape: "Shape", options: Mapping[str, Any] | None = None) -> "Encoding":
    """Build an encoding for a model shape.

    Raises:
        UserError: unknown encoding, unknown option, or an option of the wrong type or value.
    """
    cls = load(name)
    return cls(shape, **_checked(name, cls, dict(options or {})))


@functools.cache
def _installed() -> dict[str, importlib.metadata.EntryPoint]:
    return {point.name: point for point in importlib.metadata.entry_points(group=_GROUP)}


def _parameters(cls: "type[Encoding]") -> list[inspect.Parameter]:
    return [p for p in inspect.signature(cls).parameters.values() if p.name != "shape"]


def _checked(name: str, cls: "type[Encoding]", options: dict[str, Any]) -> dict[str, Any]:
    defaults = {p.name: p.default for p in _parameters(cls)}
    hints = typing.get_type_hints(cls.__init__)
    for key, value in options.items():
        if key not in defaults:
            reject_option(name, key)
        options[key] = typed(value, hints[key], f"encoding.{key}", name, defaults[key])
    return options


def typed(value: Any, hint: Any, option: str, owner: str, default: Any) -> Any:
    """An option's value as the annotation it was declared with.

    Raises:
        OptionError: it is of another type; the line names the option, its owner and its default.
    """
    import pydantic

    try:
        return pydantic.TypeAdapter(hint).validate_python(value)
    except pydantic.ValidationError as error:
        message = error.errors(include_url=False)[0]["msg"]
        said = f"is {value!r} for '{owner}': {message[0].lower()}{message[1:]} (default {default!r})"
        raise OptionError(option, said) from None


def _owner(key: str, name: str, accepted: list[str]) -> str:
    """Where a misplaced option may belong: a near name here, else the first encoding that has it."""
    near = did_you_mean(key, accepted)
    if near:
        return near.replace(":", ";", 1)
    owner = next((other for other in ("rope", *names()) if other in names() and key in options_of(other)), None)
    return f"; did you mean to choose '{owner}'?" if owner and owner != name else ""


class _Registry(types.ModuleType):
    """Lets `posbench.encodings()` list the names although `posbench.encodings` is also this package."""

    def __call__(self) -> list[str]:
        return names()


sys.modules[__name__].__class__ = _Registry
