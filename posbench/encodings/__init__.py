"""The registry of encodings: the folder is the list. `<name>.py` here is an encoding; a leading underscore is not.

Encodings from elsewhere join through the entry point group `posbench.encodings` (see `installed`).
"""

import importlib
import inspect
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from posbench import files, installed
from posbench.errors import UserError, did_you_mean, unknown
from posbench.options import checked, reject

if TYPE_CHECKING:
    from posbench.encodings.base import Encoding, Shape


def names() -> list[str]:
    """Names of all encodings, sorted. Imports none of them."""
    files = (path.stem for path in Path(__file__).parent.glob("*.py"))
    own = {stem for stem in files if not stem.startswith("_") and stem != "base"}
    return sorted(own | set(installed.points(installed.ENCODINGS)))


def load(name: str) -> "type[Encoding]":
    """The class of an encoding.

    Raises:
        UserError: no encoding of that name.
    """
    from posbench.encodings.base import Encoding

    if name not in names():
        raise unknown("encoding", name, names(), "'posbench list' shows all")
    if point := installed.points(installed.ENCODINGS).get(name):
        cls = point.load()
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
    parameters = inspect.signature(load(name)).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.name != "shape"}


def reject_option(name: str, option: str) -> NoReturn:
    """Refuse an option that an encoding lacks; the message names the accepted ones and a likely correction.

    Raises:
        UserError: always.
    """
    accepted = list(options_of(name))
    reject(option, name, accepted, "" if did_you_mean(option, accepted) else _owner(option, name))


def build(name: str, shape: "Shape", options: Mapping[str, Any] | None = None) -> "Encoding":
    """Build an encoding for a model shape.

    Raises:
        UserError: unknown encoding, unknown option, or an option of the wrong type or value.
    """
    cls, given, defaults = load(name), dict(options or {}), options_of(name)
    for key in given:
        if key not in defaults:
            reject_option(name, key)
    return cls(shape, **checked(given, typing.get_type_hints(cls.__init__), defaults, name, "encoding."))


def installed_files(name: str, options: Mapping[str, Any]) -> dict[str, str]:
    """The sha256 of the source file of each installed encoding in use, by its name; a wrapper's options name more."""
    used = sorted(set(_texts_in([name, options])) & set(installed.points(installed.ENCODINGS)))
    sources = {one: inspect.getsourcefile(load(one)) for one in used}
    return {one: files.sha256(Path(source)).hex() for one, source in sources.items() if source}


def _texts_in(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple | Mapping):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _texts_in(one)


def _owner(key: str, name: str) -> str:
    """A question that suggests the first other encoding with this option; empty if there is none."""
    owner = next((other for other in ("rope", *names()) if other in names() and key in options_of(other)), None)
    return f"; did you mean to choose '{owner}'?" if owner and owner != name else ""
