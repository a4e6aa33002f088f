"""Schemes as they are typed: an encoding's name, and the key=value words after it, which are its options."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from posbench import encodings
from posbench.config.overrides import value
from posbench.encodings.base import Shape
from posbench.errors import UserError


@dataclasses.dataclass(frozen=True)
class Scheme:
    name: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    label: str = ""  # as it was typed: rope base=100

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", self.label or self.name)


def parted(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Words that are not key=value, each with those that follow it and are.

    Raises:
        UserError: an option stands before any name.
    """
    found: list[tuple[str, list[str]]] = []
    for word in words:
        key, equals, given = word.partition("=")
        if key == "encoding" and equals:
            raise UserError(f"'{word}': an encoding stands here by its name alone, {given or 'rope'}")
        if not equals:
            found.append((word, []))
        elif found:
            found[-1][1].append(word)
        else:
            raise UserError(f"'{word}' stands before any name: an encoding's options come after it, rope {word}")
    return found


def scheme(name: str, words: Sequence[str], shape: Shape) -> Scheme:
    """An encoding with its options; `encoding.base=100` and `base=100` are one.

    Args:
        shape: of a model that it is tried for.

    Raises:
        UserError: an unknown encoding or option, or a value that it does not accept.
    """
    options: dict[str, Any] = {}
    for word in words:
        key, _, typed = word.removeprefix("encoding.").partition("=")
        *above, last = key.split(".")
        inside = options
        for part in above:
            inside = inside.setdefault(part, {})
            if not isinstance(inside, dict):
                raise UserError(f"'{word}': {part} has a value of its own beside it")
        inside[last] = value(typed)
    with torch.random.fork_rng(devices=[]):
        encodings.build(name, shape, options)
    return Scheme(name, options, " ".join([name, *(word.removeprefix("encoding.") for word in words)]))
