"""Schemes as typed by a user: the name of an encoding, or of a pattern of layers such as layered/gemma3, followed by
options as key=value.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from posbench import encodings
from posbench.config import plain_yaml
from posbench.config.overrides import read
from posbench.config.shipped import choices
from posbench.encodings.base import Shape
from posbench.errors import UserError


@dataclasses.dataclass(frozen=True)
class Scheme:
    name: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    label: str = ""  # as typed: rope base=100

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", self.label or self.name)


def parted(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Split words into names, each with the key=value words after it; UserError if one of these comes first."""
    found: list[tuple[str, list[str]]] = []
    for word in words:
        key, equals, given = word.partition("=")
        if key == "encoding" and equals:
            raise UserError(f"'{word}': expected only the name of the encoding here, {given or 'rope'}")
        if not equals:
            found.append((word, []))
        elif found:
            found[-1][1].append(word)
        else:
            raise UserError(f"'{word}' comes before any name: expected options after the encoding, rope {word}")
    return found


def is_scheme(word: str) -> bool:
    """Whether a word is the name of an encoding or of a pattern of layers."""
    return word in encodings.names() or _pattern(word) is not None


def _pattern(word: str) -> Path | None:
    """The file of a pattern such as `layered/gemma3`; None for other words."""
    group, _, name = word.partition("/")
    return choices(f"encoding/{group}").get(name) if group in encodings.names() else None


def scheme(name: str, words: Sequence[str], shape: Shape) -> Scheme:
    """An encoding with its options; `encoding.base=100` and `base=100` are the same.

    Args:
        shape: of the model to check the options against.

    Raises:
        UserError: an unknown encoding or option, or a value that it does not accept.
    """
    pattern = _pattern(name)
    options: dict[str, Any] = plain_yaml.load(pattern) if pattern else {}
    own = options.pop("name", name)
    for word in words:
        key, _, typed = word.removeprefix("encoding.").partition("=")
        *above, last = key.split(".")
        inside = options
        for part in above:
            inside = inside.setdefault(part, {})
            if not isinstance(inside, dict):
                raise UserError(f"'{word}': {part} is also set by another word: expected one of them")
        inside[last] = read(typed)
    with torch.random.fork_rng(devices=[]):
        encodings.build(own, shape, options)
    return Scheme(own, options, " ".join([name, *(word.removeprefix("encoding.") for word in words)]))
