"""Plans: what a command line asks for, checked and resolved. A plan needs no further check before it is run.

The first mistake in a command line is a UserError of one line.
Only what depends on the machine that trains, such as its memory, is checked there.
"""

import dataclasses
import itertools
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from posbench.config.overrides import split
from posbench.config.schema import Config
from posbench.config.shipped import chosen, load
from posbench.errors import UserError
from posbench.evaluation.plan import check
from posbench.run.tracking import refuse_names

_FILES = "--config-dir"


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run to be made, or to be continued: its checked configuration, its folder, and the command for its record."""

    config: Config
    folder: Path
    command: tuple[str, ...]

    @property
    def id(self) -> str:
        return self.folder.name

    @property
    def overrides(self) -> tuple[str, ...]:
        """What is set behind `posbench train` in the command."""
        return tuple(itertools.takewhile(lambda word: word != _FILES, self.command[2:]))

    @property
    def output(self) -> Path:
        """The file for what its process prints, if a sweep runs it."""
        return self.folder.parent / ".jobs" / f"{self.id}.log"

    def changed(self, config: Config, override: str = "") -> "Plan":
        """The plan of another configuration that needs no new check, by the same command with another override."""
        words = [word for word in self.overrides if split(word)[0] != override.partition("=")[0]]
        files = self.command[2 + len(self.overrides) :]
        command = ("posbench", "train", *words, *([override] if override else []), *files)
        return Plan(config, self.folder.parent / config.id, command)

    def with_seed(self, seed: int) -> "Plan":
        """The same run with another seed, which Hydra would take a quarter of a second to compose."""
        return self.changed(dataclasses.replace(self.config, seed=seed), f"seed={seed}")


def plan(config: Config, folder: Path, command: Iterable[str]) -> Plan:
    """The plan of a configuration. Raises UserError if that asks for something that does not exist or fit.

    Args:
        command: the command line, for the record.
    """
    check(config)
    refuse_names(config)
    return Plan(config, folder, tuple(command))


def resolve_one(overrides: Sequence[str], config_dir: Path | None = None) -> Plan:
    """The plan of one run."""
    from posbench.config import compose  # Hydra, which a rank does not need

    config = compose.single(list(overrides), config_dir)
    return plan(config, config.folder, _command(overrides, config_dir))


def resolve(sets: list[list[str]], config_dir: Path | None = None) -> list[Plan]:
    """The plans of all combinations of all sets of overrides, each run once however often it is named."""
    from posbench.config import compose

    plans: dict[str, Plan] = {}
    for overrides, config in (pair for words in sets for pair in compose.configs(words, config_dir)):
        new = plan(config, config.folder, _command(overrides, config_dir))
        known = plans.setdefault(new.id, new)
        if known.folder != new.folder:
            raise UserError(f"{known.folder} and {new.folder} are one run: a sweep keeps each in one folder")
    return list(plans.values())


def _command(overrides: Iterable[str], config_dir: Path | None) -> list[str]:
    return ["posbench", "train", *overrides, *([_FILES, str(config_dir)] if config_dir else [])]


def read_sets(name: str | None, overrides: list[str], config_dir: Path | None = None) -> list[list[str]]:
    """The sets of overrides that `sweep=name` and the command line ask for together.

    A sweep file holds `sets`, a list of override sets, and `shared`, a list of overrides for all of them. What is typed
    holds for every set, in the place of the file's own value of that key.

    Raises:
        UserError: no such sweep, or a file of another form.
    """
    if name is None:
        return [overrides]
    path = chosen("sweep", name, config_dir)
    content = load(path)
    try:
        sets, shared = ([shlex.split(line) for line in content.pop(key, [])] for key in ("sets", "shared"))
    except (AttributeError, TypeError, ValueError) as error:  # no lists of text, or an open quotation mark
        raise UserError(f"{path}: expected 'sets' and 'shared', lists of overrides ({error})") from None
    if not sets or content:
        raise UserError(f"{path} is not a sweep: expected 'sets', a list such as '- encoding=rope,alibi', and 'shared'")
    common = [override for line in shared for override in line]
    chosen_by_key = [{split(word)[0]: word for word in [*common, *own, *overrides]} for own in sets]
    return list({tuple(words): list(words) for words in (by_key.values() for by_key in chosen_by_key)}.values())
