"""The synthetic tasks by name: each is a class, whose docstring draws a problem and
names its source. A class of one of these modules is a task without being listed.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from posbench.errors import unknown
from posbench.tasks import retrieval, states, strings  # noqa: F401
from posbench.tasks.base import Task


def names() -> list[str]:
    """Return the names of all tasks, sorted."""
    return sorted(Task.registry)


def load(name: str) -> type[Task]:
    """Return the class of a task; UserError if there is none of that name."""
    if name not in Task.registry:
        raise unknown("task", name, names())
    return Task.registry[name]


def options_of(name: str) -> dict[str, Any]:
    """Return a task's options with their defaults."""
    return dataclasses.asdict(load(name)())


def build(name: str, options: Mapping[str, Any] | None = None) -> Task:
    """Return a task with these options, others at defaults; `name` is ignored. Raise
    UserError if one is wrong.
    """
    chosen = dict(options or {})
    chosen.pop("name", None)
    return load(name)().with_options(**chosen)
