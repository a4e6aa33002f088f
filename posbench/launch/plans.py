"""Plans: what a command line asks for, checked and resolved; only the machine that
trains may still refuse it.
"""

import dataclasses
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from posbench.config.overrides import split
from posbench.config.schema import Config
from posbench.config.shipped import choice_file, load
from posbench.errors import UserError
from posbench.evaluation.plan import check, refuse_missing_extensions


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run to be made or continued: its checked configuration, its folder, and the
    command for its record.
    """

    config: Config
    folder: Path
    command: tuple[str, ...]

    @property
    def id(self) -> str:
        """The run's name."""
        return self.folder.name

    @property
    def output(self) -> Path:
        """The file that gets what the run's process prints in a sweep."""
        return self.folder.parent / ".jobs" / f"{self.id}.log"

    def changed(self, key: str, value: Any) -> "Plan":
        """Return the plan with another value of a key. It needs no check and no Hydra,
        a quarter of a second each.
        """
        typed = f"{key}={value}"
        section, _, name = key.rpartition(".")
        if section:
            value_of_section = getattr(self.config, section)
            value = dataclasses.replace(value_of_section, **{name: value})
        config = dataclasses.replace(self.config, **{section or name: value})
        words = [
            word
            for word in self.command[2:]
            if word.startswith("--") or split(word)[0] != key
        ]
        command = ("posbench", "train", *words, typed)
        return Plan(config, self.folder.parent / config.id, command)


def plan(config: Config, words: Iterable[str], config_dir: Path | None = None) -> Plan:
    """Return the plan of a configuration and of the words that gave it. Raises
    UserError if parts of it do not fit.
    """
    check(config)
    files = [f"--config-dir={config_dir}"] if config_dir else []
    return Plan(config, config.folder, ("posbench", "train", *words, *files))


def resolve_one(words: list[str], config_dir: Path | None = None) -> Plan:
    """Return the plan of one run; UserError if a new one would have no row with one of
    its extensions. A sweep's encodings need not all have one.
    """
    from posbench.config import compose  # it imports Hydra, which a rank does not need

    found = plan(compose.single(words, config_dir), words, config_dir)
    if not found.folder.exists():
        refuse_missing_extensions(found.config)
    return found


def resolve(sets: list[list[str]], config_dir: Path | None = None) -> list[Plan]:
    """Return the plans of all combinations of all sets of overrides, each run once
    however often it is named.
    """
    from posbench.config import compose

    plans: dict[str, Plan] = {}
    for overrides in sets:
        for words, config in compose.configs(overrides, config_dir):
            first_plan = plans.setdefault(config.id, plan(config, words, config_dir))
            if first_plan.folder != config.folder:
                raise UserError(
                    f"{first_plan.folder} and {config.folder} are the same run:"
                    " expected it in one folder"
                )
    return list(plans.values())


def read_sets(
    name: str | None, overrides: list[str], config_dir: Path | None = None
) -> list[list[str]]:
    """Return the sets of overrides that `sweep=name` and the command line ask for
    together.

    A file holds `sets`, a list, and `shared`, overrides for all of them. What is typed
    takes the place of a file's own.
    """
    if name is None:
        return [overrides]
    path = choice_file("sweep", name, [config_dir] if config_dir else [])
    content = {"shared": [], "sets": [], **load(path)}
    try:
        sets = [
            [*shlex.split(" ".join([*content["shared"], line])), *overrides]
            for line in content["sets"]
        ]
    except (TypeError, ValueError):
        sets = []
    if not sets or len(content) > 2:
        expected = (
            "expected 'sets', a list such as '- encoding=rope,alibi', and 'shared'"
        )
        raise UserError(f"{path} is not a sweep: {expected}")
    return [list({split(word)[0]: word for word in words}.values()) for words in sets]
