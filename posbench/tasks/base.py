"""The contract of a synthetic task: a vocabulary, and problems of any length with their
answers, which are scored.

Problems of one length have equally many tokens. Docstrings draw each label below the
token after which it is predicted:

    length 1    reads   <|endoftext|>  s3  =   s3
                scores                     s3  <|endoftext|>
"""

import dataclasses
import re
import typing
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from annotated_types import Ge
from numpy.typing import NDArray

from posbench.errors import OptionError, Undefined
from posbench.options import checked

Integers = NDArray[np.int64]
Choices = Annotated[int, Ge(2)]  # the number of symbols to draw from
# id 0: begins every problem; ends an answer if the model must know its length
SEPARATOR = "<|endoftext|>"
ANSWER = "="  # id 1, in tasks that use it: between question and answer


@dataclasses.dataclass(frozen=True, eq=False)
class Problems:
    """Problems of one length."""

    ids: Integers  # (count, size + 1); inputs are ids[:, :-1], labels ids[:, 1:]
    # (count, size): whether the label of input t belongs to the answer
    scored: NDArray[np.bool_]

    @classmethod
    def ending(cls, ids: Integers, tokens: int) -> Self:
        """Return problems whose answers are their last `tokens` tokens."""
        scored = np.zeros((len(ids), ids.shape[1] - 1), np.bool_)
        scored[:, -tokens:] = True
        return cls(ids, scored)

    @classmethod
    def answered(cls, question: Integers, answer: Integers, end: bool = False) -> Self:
        """Return questions (count, Q), `=` and scored answers (count, A) as problems;
        `end` adds a scored separator.
        """
        separator = np.zeros((len(question), 1), np.int64)
        if end:
            answer = np.concatenate([answer, separator], axis=1)
        mark = separator + 1
        ids = np.concatenate([separator, question, mark, answer], axis=1)
        return cls.ending(ids, answer.shape[1])

    def before(self, back: int) -> Integers:
        """Return for each input the token that stands `back` places before it, 0 before
        the first: (count, size).
        """
        size = self.scored.shape[1]
        shifted = np.pad(self.ids, ((0, 0), (back, 0)))
        return shifted[:, :size]

    def commonest_left(self, bag: Integers) -> Integers:
        """Return, per label, the commonest token of a bag (count, n) that the answer
        has left, or 0: (count, size).
        """
        labels = self.ids[:, 1:]
        rows = np.arange(len(bag))
        counts = np.zeros((len(bag), int(self.ids.max()) + 1), np.int64)
        np.add.at(counts, (rows[:, None], bag), 1)
        guesses = np.zeros_like(labels)
        for t in np.flatnonzero(self.scored.any(axis=0)):
            # the lowest of equally common ids wins, but 0 only if no other is left
            counts[:, 0] = 0
            guesses[:, t] = counts.argmax(axis=1)
            counts[rows, labels[:, t]] -= self.scored[:, t]
        return guesses


@dataclasses.dataclass(frozen=True)
class Task:
    """Base of all tasks. The fields of a subclass are its options, and each has a
    default.
    """

    # shortest and longest trained length, inclusive; each task defines its unit
    shortest: int = 1
    longest: int = 1

    name: ClassVar[str]  # the name in the registry: selective_copy for SelectiveCopy
    least: ClassVar[int] = 1  # the shortest possible problem
    words: ClassVar[str] = ANSWER  # symbols of the vocabulary that no option changes
    # every task by its name: a class is a task without being listed
    registry: ClassVar[dict[str, type["Task"]]] = {}
    # numbered symbols, `s0`, `s1`, ..., and the option that counts them
    kinds: ClassVar[dict[str, str]] = {}
    # Values of options that evaluation tests in addition. The task of such a row is
    # called passkey:depth=0.5.
    variations: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        cls.name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        cls.registry[cls.name] = cls

    def __post_init__(self) -> None:
        if not self.least <= self.shortest <= self.longest:
            raise OptionError(
                "data.task.shortest",
                f"is {self.shortest} for '{self.name}': expected a length from"
                f" {self.least} to longest, {self.longest}",
            )
        if self.limit is not None and self.longest > self.limit:
            raise OptionError(
                "data.task.longest",
                f"is {self.longest} for '{self.name}': expected at most {self.limit}",
            )

    @property
    def limit(self) -> int | None:
        """The longest problem that the vocabulary allows; None = any."""
        return None

    @property
    def symbols(self) -> tuple[str, ...]:
        """The vocabulary by id: the separator, which begins every problem, then `words`
        and `kinds`.
        """
        symbols = [SEPARATOR, *self.words.split()]
        for kind, option in self.kinds.items():
            count = getattr(self, option)
            symbols += [f"{kind}{number}" for number in range(count)]
        return tuple(symbols)

    def size(self, length: int) -> int:
        """Return the number of input tokens of a problem of this length."""
        return length + 2

    def problems(self, rng: np.random.Generator, length: int, count: int) -> Problems:
        """Return fresh problems of one length. Raise Undefined if the vocabulary has
        too few symbols.
        """
        if self.limit is not None and length > self.limit:
            raise Undefined(
                f"'{self.name}' has no problem of length {length}: its vocabulary"
                f" allows {self.limit}"
            )
        return self.drawn(rng, length, count)

    def drawn(self, rng: np.random.Generator, length: int, count: int) -> Problems:
        """Return problems of a length that `problems` has checked; each task draws its
        own.
        """
        raise NotImplementedError

    def trivial(self, problems: Problems) -> Integers:
        """Return a simple guess of each label, (count, size): by default the commonest
        token left of the answer.
        """
        answer = np.where(problems.scored, problems.ids[:, 1:], 0)
        return problems.commonest_left(answer)

    def with_options(self, **options: Any) -> Self:
        """Return a copy of this task with some options replaced. Raise UserError for a
        wrong name, type or value.
        """
        hints = typing.get_type_hints(type(self), include_extras=True)
        former = dataclasses.asdict(self)
        values = checked(options, hints, former, self.name, "data.task.")
        return dataclasses.replace(self, **values)


def distinct(
    rng: np.random.Generator, choices: int, number: int, count: int
) -> Integers:
    """Return (count, number) numbers below `choices`, all different in a row, in random
    order.
    """
    return rng.random((count, choices)).argsort(axis=1)[:, :number]
