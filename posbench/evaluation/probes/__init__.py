"""Probes of what a model does with its context. The folder is the registry: `<name>.py` here is a task.

A task says which rows it wants: `rows(lengths, targets, train_length) -> list[Probe]`. All of them score fixed targets
at the end of their windows; what differs is the context those windows hold, or which of the targets count.
"""

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from posbench.errors import UserError, did_you_mean

Ids = NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class KeyTokens:
    """Targets whose nll under a reference model falls by more than `nats` from `short` to `long` tokens of context."""

    short: int
    long: int
    nats: float


@dataclasses.dataclass(frozen=True)
class Probe:
    """One row that a task asks for."""

    task: str  # the row's `task`: the task's name, with a suffix where it has several rows per length
    length: int  # tokens read
    targets: int  # how many of the window's last predictions are scored
    rewrite: Callable[[Ids], Ids] | None = None  # of one window's length + 1 tokens; the targets must stay
    select: KeyTokens | None = None  # which targets count; None = all


def names() -> list[str]:
    """Names of all tasks, sorted. Imports none of them."""
    stems = (path.stem for path in Path(__file__).parent.glob("*.py"))
    return sorted(stem for stem in stems if not stem.startswith("_"))


def of(name: str, lengths: list[int], targets: int, train_length: int) -> list[Probe]:
    """The rows of a task.

    Args:
        lengths: the lengths evaluated, in tokens, ascending.
        targets: target tokens per block that the settings ask for.
        train_length: in tokens.

    Raises:
        UserError: no task of that name.
    """
    if name not in names():
        raise UserError(f"unknown task '{name}'{did_you_mean(name, names())} (there are {', '.join(names())})")
    found: list[Probe] = importlib.import_module(f"{__name__}.{name}").rows(lengths, targets, train_length)
    return found
