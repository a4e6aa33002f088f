"""The errors a user can meet: one line each, with the exit code that belongs to it.

A function whose name begins with `refuse` raises UserError for what its docstring
names.
"""

import difflib
import traceback
from collections.abc import Iterable
from pathlib import Path

OUT_OF_MEMORY = "out of memory"  # how the message of such a failure begins
# what Python raises for a mistake in a program
_MISTAKES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    TypeError,
)


class PosbenchError(Exception):
    """An error that posbench raises on purpose. `exit_code` is the process's exit
    status.
    """

    exit_code = 1


class UserError(PosbenchError):
    """A mistake of the user. The message says what is wrong, what was expected, and the
    nearest valid choice.
    """

    exit_code = 2


class OptionError(UserError):
    """An option has the wrong type or is out of range. `key` is its full key
    (encoding.base), `text` what is wrong.
    """

    def __init__(self, key: str, text: str) -> None:
        super().__init__(f"{key} {text}")
        self.key, self.text = key, text

    def under(self, key: str) -> "OptionError":
        """Return the same error for an encoding whose options have another prefix:
        encoding.inner_options.base.
        """
        return OptionError(key + self.key.removeprefix("encoding"), self.text)


class Undefined(UserError):
    """A result is undefined, such as beyond the end of a learned table or with an
    extension that is not supported.
    """


class InUse(UserError):
    """Another process owns the run folder: try again later."""

    exit_code = 75


class RunFailed(PosbenchError):
    """A run failed. `reason` is recorded in `run.json`: diverged, oom, disk or
    error.
    """

    def __init__(self, message: str, reason: str = "error") -> None:
        super().__init__(message)
        self.reason = reason


class RowsFailed(RunFailed):
    """Some rows of an evaluation, or some of several evaluations, failed. All others
    were measured and written.
    """


class Stopped(PosbenchError):
    """A signal stopped the run after it had saved. The exit code is 128 + the signal's
    number.
    """

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


def is_own_mistake(error: BaseException) -> bool:
    """Return whether an error is a mistake in posbench's own code, which is to show as
    what it is: none that a library raised, nor one that was raised on purpose.
    """
    if not isinstance(error, _MISTAKES):
        return False
    *_, last = traceback.extract_tb(error.__traceback__)
    return Path(last.filename).is_relative_to(Path(__file__).parent)


def nearest(name: str, choices: Iterable[str], cutoff: float = 0.5) -> str | None:
    """Return the choice that is spelt most like a name; None if none is similar
    enough.
    """
    by_bare = {_bare(choice): choice for choice in reversed(list(choices))}
    wanted = _bare(name)
    for bare, choice in by_bare.items():
        if sorted(wanted) != sorted(bare):
            continue
        n_other = sum(a != b for a, b in zip(wanted, bare, strict=True))
        if n_other == 2:  # two letters changed places: `abili` and `alibi`
            return choice
    close = difflib.get_close_matches(wanted, by_bare, n=1, cutoff=cutoff)
    return by_bare[close[0]] if close else None


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return `": did you mean 'rope'?"` for the nearest choice, or an empty string if
    none is near.
    """
    close = nearest(name, choices)
    return f": did you mean '{close}'?" if close else ""


def unknown(kind: str, name: str, choices: Iterable[str], hint: str = "") -> UserError:
    """Return the error about an unknown name of a kind, with the nearest choice, and a
    hint or the list of choices.
    """
    choices = list(choices)
    hint = hint or f"there are {', '.join(choices)}"
    return UserError(f"unknown {kind} '{name}'{did_you_mean(name, choices)} ({hint})")


def _bare(name: str) -> str:
    return name.lower().replace("-", "_")
