"""The registry of synthetic tasks: each is a class, whose docstring draws a problem and names its source."""

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

from posbench.errors import unknown
from posbench.tasks.base import Task

_FILES = {
    "strings": ("copy", "repeat", "reverse", "selective_copy", "sort"),
    "retrieval": ("induction", "passkey", "recall"),
    "states": ("addition", "counting", "flip_flop", "parity"),
}
_FILE_OF = {name: file for file, names in _FILES.items() for name in names}


def names() -> list[str]:
    """Names of all tasks, sorted. Imports none of them."""
    return sorted(_FILE_OF)


def load(name: str) -> type[Task]:
    """The class of a task; UserError if there is none of that name."""
    if name not in _FILE_OF:
        raise unknown("task", name, names())
    task: type[Task] = getattr(importlib.import_module(f"{__name__}.{_FILE_OF[name]}"), name.title().replace("_", ""))
    return task


def options_of(name: str) -> dict[str, Any]:
    """A task's options with their defaults."""
    return {field.name: field.default for field in dataclasses.fields(load(name))}


def build(name: str, options: Mapping[str, Any] | None = None) -> Task:
    """Build a task; options that are not given keep their defaults.

    Raises:
        UserError: unknown task, unknown option, or an option of the wrong type or value.
    """
    # The fields of each task have defaults.
    return load(name)().varied(**(options or {}))  # type: ignore[call-arg]
