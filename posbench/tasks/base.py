"""The contract of a synthetic task: a vocabulary, and problems of any length with their answers.

A *task* draws *problems*; the scored tokens of a problem are its *answer*. The code keeps to these words.

Problems are drawn from a generator that the caller names, so that they are a pure function of (seed, step). All
problems of one length have one size; none needs padding within its length.

The drawings in the tasks' docstrings put each label below the token after which the model must predict it:

    length 1    reads   <|endoftext|>  s3  =   s3
                scores                     s3  <|endoftext|>
"""

import dataclasses
import re
import typing
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from posbench.errors import OptionError, Undefined
from posbench.options import checked, plain

Integers = NDArray[np.int64]
Bools = NDArray[np.bool_]

SEPARATOR = "<|endoftext|>"  # id 0: begins every problem; ends an answer if the model must know its length
ANSWER = "="  # id 1, in tasks that use it: between question and answer
MOST_SYMBOLS = 10_000  # upper limit for options


@dataclasses.dataclass(frozen=True, eq=False)
class Problems:
    """Problems of one length."""

    ids: Integers  # (count, size + 1); inputs are ids[:, :-1], labels ids[:, 1:]
    scored: Bools  # (count, size): whether the label of input t belongs to the answer


@dataclasses.dataclass(frozen=True)
class Task:
    """Base of all tasks. The fields of a subclass are its options, and each has a default."""

    shortest: int  # shortest and longest trained length, inclusive; each task defines its unit
    longest: int

    name: ClassVar[str]  # of the class, as in the registry: selective_copy of SelectiveCopy
    least: ClassVar[int] = 1  # the shortest possible problem
    numbers: ClassVar[dict[str, int]] = {}  # options that are numbers of symbols, and the least of each
    shares: ClassVar[dict[str, str]] = {}  # options from 0 to 1, and what is expected of each
    # Options that evaluation also tests with other values; such a row's task is called passkey:depth=0.5.
    variants: ClassVar[tuple[str, ...]] = ()
    # What `trivial` does, in words that follow "a reader that".
    trivial_reader: ClassVar[str] = (
        "knows which tokens of the answer are left but not their order, and says the commonest"
    )

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def __post_init__(self) -> None:
        for option, least in self.numbers.items():
            self.expect_number(option, least)
        for option, expected in self.shares.items():
            share = getattr(self, option)
            self.expect(share is None or 0 <= share <= 1, option, expected)
        fits = self.least <= self.shortest <= self.longest
        self.expect(fits, "shortest", f"a length from {self.least} to longest, {self.longest}")
        if self.limit is not None:
            self.expect(self.longest <= self.limit, "longest", f"at most {self.limit}, which the vocabulary allows")

    def expect(self, holds: bool, option: str, expected: str) -> None:
        """Raise OptionError unless `holds`: in one line the option, its value, what was expected and the default."""
        if not holds:
            default = next(field.default for field in dataclasses.fields(self) if field.name == option)
            said = f"is {plain(getattr(self, option))} for '{self.name}': expected {expected}"
            raise OptionError(f"data.task.{option}", f"{said} (default {plain(default)})")

    def expect_number(self, option: str, least: int) -> None:
        """Raise OptionError if a number of symbols is below `least` or above the limit."""
        fits = least <= getattr(self, option) <= MOST_SYMBOLS
        self.expect(fits, option, f"a whole number from {least} to {MOST_SYMBOLS}")

    @property
    def limit(self) -> int | None:
        """The longest problem that the vocabulary has enough symbols for; None = any."""
        return None

    @property
    def symbols(self) -> tuple[str, ...]:
        """The vocabulary by id. Id 0 is the separator, which begins every problem, as it begins every document."""
        raise NotImplementedError

    def size(self, length: int) -> int:
        """The number of input tokens of a problem of this length."""
        raise NotImplementedError

    def problems(self, rng: np.random.Generator, length: int, count: int) -> Problems:
        """Fresh problems of one length; Undefined if the vocabulary has too few symbols for it."""
        if self.limit is not None and length > self.limit:
            raise Undefined(f"'{self.name}' has no problem of length {length}: its vocabulary allows {self.limit}")
        return self.drawn(rng, length, count)

    def drawn(self, rng: np.random.Generator, length: int, count: int) -> Problems:
        """Draw the problems; `problems` has checked the length."""
        raise NotImplementedError

    def trivial(self, problems: Problems) -> Integers:
        """What a trivial reader answers: the share it has right is the floor of a task, and often far above chance.

        The reader sees the right answer tokens before the one it says, as a model does.

        Returns:
            (count, size) one token after each input; only those of scored tokens count.
        """
        return commonest_left(problems, np.where(problems.scored, problems.ids[:, 1:], 0))

    def varied(self, **options: Any) -> Self:
        """A copy of this task with some options replaced.

        Raises:
            UserError: unknown option, or one of the wrong type or value.
        """
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        replaced = checked(options, typing.get_type_hints(type(self)), defaults, self.name, "data.task.")
        return dataclasses.replace(self, **replaced)


def numbered(kind: str, count: int) -> tuple[str, ...]:
    """The symbols `s0`, `s1`, ... of a kind."""
    return tuple(f"{kind}{number}" for number in range(count))


def answered(question: Integers, answer: Integers, end: bool = False) -> Problems:
    """A question (count, Q), `=`, and the scored answer (count, A); `end` adds and scores a separator."""
    mark = np.ones((len(question), 1), np.int64)
    ids = np.concatenate([mark * 0, question, mark, answer, *([mark * 0] if end else [])], axis=1)
    return ending(ids, answer.shape[1] + end)


def ending(ids: Integers, tokens: int) -> Problems:
    """Problems whose answer is their last tokens."""
    scored = np.zeros((len(ids), ids.shape[1] - 1), np.bool_)
    scored[:, -tokens:] = True
    return Problems(ids, scored)


def without_replacement(rng: np.random.Generator, choices: int, number: int, count: int) -> Integers:
    """(count, number) numbers below `choices`, all different in a row, in random order."""
    return rng.random((count, choices)).argsort(axis=1)[:, :number]


def commonest_left(problems: Problems, bag: Integers) -> Integers:
    """Say the commonest token of the bag that the answer has not used yet; the separator if none is left.

    Args:
        bag: (count, n) tokens in any order; 0 is none.
    """
    labels = problems.ids[:, 1:]
    rows = np.arange(len(bag))
    left = np.zeros((len(bag), int(problems.ids.max()) + 1), np.int64)
    np.add.at(left, (rows[:, None], bag), 1)
    guesses = np.zeros_like(labels)
    for t in np.flatnonzero(problems.scored.any(axis=0)):
        left[:, 0] = 0  # of equally common tokens the one of the lowest id, and the separator last
        guesses[:, t] = left.argmax(axis=1)
        left[rows, labels[:, t]] -= problems.scored[:, t]
    return guesses


def tokens_before(problems: Problems, back: int) -> Integers:
    """Say the input that stands `back` tokens before the last one read."""
    return np.pad(problems.ids, ((0, 0), (back, 0)))[:, : problems.scored.shape[1]]
