"""Probes of what a model does with its context. The folder is the registry: each
`<name>.py` is a probe.

A probe says which rows it wants at a length: `rows(length, targets, train_length, *,
option=...) -> list[Probe]`. Some score fixed targets at the end of their windows and
vary only the context in them. Others pose a problem in each window, with a choice of
tokens as answers. Options are written like those of extensions: `shuffle:keep=32`.
"""

import dataclasses
import importlib
import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posbench import registry
from posbench.config.overrides import parse_choice
from posbench.options import checked
from posbench.randomness import derive

Ids = NDArray[np.int64]
# token ids of each text
Encode = Callable[[Sequence[str]], Sequence[NDArray[np.integer]]]


@dataclasses.dataclass(frozen=True, eq=False)
class Material:
    """The material for problems."""

    text: Ids  # tokens of the text
    encode: Encode  # encodes with the model's own tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """A problem: which of several tokens comes next?"""

    ids: Ids  # (C + 1,): C tokens are read, the last one is the answer
    candidates: Ids  # (K,): different tokens
    right: int  # the index of the answer among them
    # the index of the trivial reader's answer; None: there is no such reader
    trivial: int | None = None


# makes a problem of a window's tokens (C,) and its number
Pose = Callable[[Ids, int], Choice]


@dataclasses.dataclass(frozen=True)
class Probe:
    """One row that a probe asks for."""

    # the probe's name, with a suffix if it has several rows per length
    name: str
    length: int  # tokens read
    targets: int  # how many of the window's last predictions are scored
    # changes a window's length + 1 tokens, but not the targets
    rewrite: Callable[[Ids], Ids] | None = None
    # makes, from the text, the function that puts a problem in a window's place, or
    # raises Undefined
    pose_from: Callable[[Material], Pose] | None = None
    offset: int = 0  # the position of the first token read


def balanced(name: str, number: int, answers: int) -> int:
    """Return which answer is right in the window of a number: each once in every
    `answers` windows, in shuffled order.

    Independent draws over 128 windows would favour some answer, and with it a model
    that always gives that answer.
    """
    turn, place = divmod(number, answers)
    rng = np.random.default_rng(derive(0, name, "answers", turn))
    return int(rng.permutation(answers)[place])


def names() -> list[str]:
    """Return the names of all probes, sorted, without importing them."""
    return registry.names(registry.PROBES)


def options_of(name: str) -> dict[str, Any]:
    """Return a probe's options with their defaults."""
    options = {}
    for parameter in inspect.signature(_rows_of(name)).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            options[parameter.name] = parameter.default
    return options


def of(text: str, length: int, targets: int, train_length: int) -> list[Probe]:
    """Return the rows of a probe, `repeat` or `shuffle:keep=32`, at a length. Raises
    UserError for an unknown option.
    """
    name, options = parse_choice(text)
    rows = _rows_of(name)
    hints = typing.get_type_hints(rows, include_extras=True)
    options = checked(options, hints, options_of(name), name)
    return rows(length, targets, train_length, **options)


def _rows_of(name: str) -> Callable[..., list[Probe]]:
    rows: Callable[..., list[Probe]]
    rows = importlib.import_module(f"{__name__}.{name}").rows
    return rows
