"""The registry of synthetic tasks: each is a class, whose docstring draws a problem and
names its source.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from posbench.errors import unknown
from posbench.tasks.base import Task
from posbench.tasks.retrieval import Induction, Passkey, Recall
from posbench.tasks.states import Addition, Counting, FlipFlop, Parity
from posbench.tasks.strings import Copy, Repeat, Reverse, SelectiveCopy, Sort

_ALL: list[type[Task]] = [
    Addition,
    Copy,
    Counting,
    FlipFlop,
    Induction,
    Parity,
    Passkey,
    Recall,
    Repeat,
    Reverse,
    SelectiveCopy,
    Sort,
]
_TASKS = {task.name: task for task in _ALL}


def names() -> list[str]:
    """Return the names of all tasks, sorted."""
    return sorted(_TASKS)


def load(name: str) -> type[Task]:
    """Return the class of a task; UserError if there is none of that name."""
    if name not in _TASKS:
        raise unknown("task", name, names())
    return _TASKS[name]


def options_of(name: str) -> dict[str, Any]:
    """Return a task's options with their defaults."""
    return {field.name: field.default for field in dataclasses.fields(load(name))}


def build(name: str, options: Mapping[str, Any] | None = None) -> Task:
    """Return a task with these options, others at defaults; `name` is ignored. Raise
    UserError if one is wrong.
    """
    return load(name)().varied(
        **{key: value for key, value in (options or {}).items() if key != "name"}
    )
