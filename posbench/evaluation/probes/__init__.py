"""Probes of what a model does with its context. The folder is the registry: `<name>.py` here is a task.

A task says which rows it wants: `rows(lengths, targets, train_length, *, option=...) -> list[Probe]`. Some score fixed
targets at the end of their windows; what differs is the context those windows hold. Others pose a problem in each
window, with a choice of tokens as answers. Options are written as those of extensions are: `shuffle:keep=32`.
"""

import dataclasses
import importlib
import inspect
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posbench.errors import OptionError, unknown
from posbench.evaluation.models import parse_choice
from posbench.options import checked
from posbench.randomness import derive

Ids = NDArray[np.int64]
Encode = Callable[[Sequence[str]], Sequence[NDArray[np.integer]]]  # token ids of each text
# Benchmarks that are no probes: the module whose `check` refuses settings, and whose `planned` has the rows.
BENCHMARKS = {"ruler": "posbench.serving.ruler"}


@dataclasses.dataclass(frozen=True, eq=False)
class Material:
    """The material for problems."""

    text: Ids  # tokens of the text
    encode: Encode | None  # by the model's own tokenizer; None: not known


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """A problem: which of several tokens comes next?"""

    ids: Ids  # (C + 1,): C tokens are read, the last one is the answer
    candidates: Ids  # (K,): different tokens
    right: int  # which of them it is
    trivial: int | None = None  # which of them the trivial reader says; None: the task has no such reader


Pose = Callable[[Ids, int], Choice]  # of what a window of the text reads (C,), and its number


@dataclasses.dataclass(frozen=True)
class Probe:
    """One row that a task asks for."""

    task: str  # the row's `task` without options: the task's name, with a suffix where it has several rows per length
    length: int  # tokens read
    targets: int  # how many of the window's last predictions are scored
    rewrite: Callable[[Ids], Ids] | None = None  # of one window's length + 1 tokens; the targets must stay
    poses: Callable[[Material], Pose] | None = None  # a problem in each window; raises Undefined where there is none
    offset: int = 0  # the position of the first token read


def balanced(task: str, number: int, answers: int) -> int:
    """Return which answer is right in a window, by its number: each once in every `answers` windows, shuffled.

    Independent draws over 128 windows would favour some answer, and so a model that always gives it.
    """
    turn, place = divmod(number, answers)
    return int(np.random.default_rng(derive(0, task, "answers", turn)).permutation(answers)[place])


def names() -> list[str]:
    """Return the names of all tasks, sorted. Imports none of them."""
    return sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py"))


def benchmark(name: str) -> Any:
    """Return the module of a benchmark, which stands above this one and is imported only where it is asked for."""
    return importlib.import_module(BENCHMARKS[name])


def options_of(name: str) -> dict[str, Any]:
    """Return a task's options with their defaults."""
    rows = importlib.import_module(f"{__name__}.{name}").rows
    return {p.name: p.default for p in inspect.signature(rows).parameters.values() if p.kind is p.KEYWORD_ONLY}


def of(text: str, lengths: list[int], targets: int, train_length: int) -> list[Probe]:
    """Return the rows of a task, `repeat` or `shuffle:keep=32`; UserError if there is no such task or option."""
    if text in BENCHMARKS:
        return []
    name, options = parse_choice(text, "shuffle:keep=32")
    if name not in names():
        choices = [*names(), *BENCHMARKS]
        raise unknown("probe", name, choices, f"there are {', '.join(choices)}; what is trained on is data=task/copy")
    rows: Callable[..., list[Probe]] = importlib.import_module(f"{__name__}.{name}").rows
    return rows(lengths, targets, train_length, **checked(options, typing.get_type_hints(rows), options_of(name), name))


def expect(condition: bool, task: str, option: str, value: object, expected: str) -> None:
    """Raise OptionError unless the condition holds."""
    if not condition:
        raise OptionError(option, f"is {value} for '{task}': expected {expected}")
