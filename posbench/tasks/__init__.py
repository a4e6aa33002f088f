"""The registry of synthetic tasks: the folder is the list. `<name>.py` here is a task, except `base`."""

import dataclasses
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posbench.errors import unknown
from posbench.tasks.base import Task


def names() -> list[str]:
    """Names of all tasks, sorted. Imports none of them."""
    return sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py") if path.stem != "base")


def load(name: str) -> type[Task]:
    """The class of a task; UserError if there is none of that name."""
    if name not in names():
        raise unknown("task", name, names())
    module = importlib.import_module(f"{__name__}.{name}")
    (found,) = (
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Task) and value.__module__ == module.__name__
    )
    return found


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
