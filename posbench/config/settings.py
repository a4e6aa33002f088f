"""The settings there are, read from the configuration's dataclasses: every key, and the values it is limited to.

Imports nothing heavy, since help and shell completion are made of it.
"""

import dataclasses
import functools
import typing
from collections.abc import Iterator
from typing import Any, Literal

from posbench.config.schema import Config


@functools.cache
def settings() -> dict[str, tuple[str, ...]]:
    """Every `section.key` in its order, and the values it can have: those named by its type, or () for any.

    An encoding's options are not among them: they stand in its YAML.
    """
    return {key: values for key, values in _of(Config, "") if not key.startswith("encoding.")}


def key_of(section: str, value: str) -> str | None:
    """The key of a section that can have a value: `tracking.mode` for `offline`."""
    return next((key for key, values in settings().items() if key.startswith(f"{section}.") and value in values), None)


def listed() -> list[str]:
    """All keys as text, a paragraph for each section."""
    sections: dict[str, list[str]] = {}
    for key in settings():
        section, dot, name = key.partition(".")
        sections.setdefault(section if dot else "", []).append(name or key)
    first = f"Keys, given as section.key=value: {', '.join(sections.pop(''))};"
    listed = [f"{section}: {', '.join(names)}" for section, names in sections.items()]
    return [first, "encoding: the options of the chosen one", *listed]


def _of(cls: type, prefix: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            yield from _of(typing.cast(type, kind), f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", tuple(_named(kind))


def _named(kind: Any) -> Iterator[str]:
    """The values that a type names, as they are typed: of a list, those of its items."""
    if kind is bool:
        yield from ("true", "false")
    elif typing.get_origin(kind) is Literal:
        yield from typing.get_args(kind)
    else:
        for inner in typing.get_args(kind):
            yield from _named(inner)
