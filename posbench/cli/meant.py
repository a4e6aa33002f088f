"""Suggestions for a command line that Typer refuses: another tool's command, or a setting written as an option."""

import shlex
from collections.abc import Iterable
from typing import Any

from posbench.config import keys
from posbench.config.overrides import OF_A_FINISHED_RUN, OF_A_SWEEP, WORDS
from posbench.config.settings import settings
from posbench.config.shipped import GROUPS, choices
from posbench.errors import named

# Other tools' names of commands.
_ELSEWHERE = {
    "run": "train", "fit": "train", "compare": "sweep", "multirun": "sweep", "eval": "evaluate", "test": "evaluate",
    "benchmark": "bench", "plot": "report", "draw": "show", "ls": "list", "upload": "sync", "rm": "clean",
    "convert": "export", "save": "export",
}  # fmt: skip
_OF_A_RUN = ("seed", *GROUPS, "study")  # a single letter stands for the first of these that begins with it


def hint(arguments: list[str], error: Any) -> str:
    """A message that suggests a correct command line for one of Typer's errors; empty if there is no suggestion."""
    said: str = error.format_message()
    first, *rest = arguments
    if said.startswith("Missing argument 'paths'"):
        return f"which runs? posbench {first} outputs/STUDY"
    if said.startswith("No such option: --resume"):
        return "there is no --resume: repeat the same command to continue or complete the run"
    if said.startswith("No such option: --dry-run"):
        return "--dry-run is for sweep and reproduce: 'posbench sweep encoding=rope --dry-run' says what one run takes"
    if said.startswith("No such option"):
        return _settings(arguments, error)
    if not said.startswith("No such command"):
        return ""
    if first == "help":
        return f"no command 'help': did you mean 'posbench {shlex.join([*rest[:1], '--help'])}'?"
    if "=" in first:
        return f"no command '{first}': did you mean 'posbench train {shlex.join(arguments)}'?"
    if name := named(first, choices("encoding")):
        return f"no command '{first}': did you mean 'posbench train encoding={name}' or 'posbench show {name}'?"
    if first in _ELSEWHERE:
        return f"no command '{first}': did you mean '{_ELSEWHERE[first]}'?"
    return ""


def _settings(arguments: list[str], error: Any) -> str:
    """`--seed 3` is `seed=3`: the line with every unknown option as key=value."""
    command, *rest = arguments if not arguments[0].startswith("-") else ["train", *arguments]
    known = {option for parameter in error.ctx.command.params for option in parameter.opts}
    of_a_run = [*_OF_A_RUN, *WORDS, *settings()]
    taken = {
        "train": of_a_run,
        "sweep": [*of_a_run, *OF_A_SWEEP],
        "bench": of_a_run,
        "evaluate": OF_A_FINISHED_RUN,
        "sync": [key for key in settings() if key.startswith("tracking.")],
    }
    if command not in taken:
        return ""
    line, words = ["posbench", command], iter(rest)
    for text in words:
        option, equals, value = text.partition("=")
        if not option.startswith("-") or option in known:
            line.append(text)
            continue
        name = option.lstrip("-").replace("-", "_")
        key, explanation = _key(name, taken[command])
        if not key:
            return explanation and f"no option '{option}': settings are key=value{explanation}"
        line.append(f"{key}={value if equals else next(words, '...')}")
    return f"settings are key=value, without dashes: did you mean '{shlex.join(line)}'?"


def _key(name: str, taken: Iterable[str]) -> tuple[str, str]:
    """The key that an option's name stands for (`seed` for `s`), or an explanation, as `keys.meant`."""
    if len(name) == 1:
        return next((key for key in _OF_A_RUN if key in taken and key.startswith(name)), ""), ""
    return (name, "") if name in taken else keys.meant(name, taken)
