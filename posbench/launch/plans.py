"""Plans: what a command line asks for, checked and resolved. A plan needs no further check before it is run.

The first mistake in a command line is a UserError of one line.
Only what depends on the machine that trains, such as its memory, is checked there.
"""

import dataclasses
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from posbench.config import plain_yaml
from posbench.config.identity import run_folder
from posbench.config.overrides import full_key, parted, refuse_twice
from posbench.config.schema import Config
from posbench.config.shipped import chosen
from posbench.errors import UserError
from posbench.evaluation.check import check


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
        """What stands behind `posbench train` in the command."""
        return self.command[2:]

    @property
    def output(self) -> Path:
        """The file for what its process prints, if a sweep runs it."""
        return self.folder.parent / ".jobs" / f"{self.id}.log"

    def at(self, config: Config, overrides: Iterable[str], study: Path) -> "Plan":
        """A plan for another configuration that needs no new check, in a study's folder."""
        return Plan(config, run_folder(config, study), ("posbench", "train", *overrides))

    def with_seed(self, seed: int) -> "Plan":
        """The same run with another seed, which Hydra would take a quarter of a second to compose."""
        kept = [override for override in self.overrides if parted(override)[0] != "seed"]
        return self.at(dataclasses.replace(self.config, seed=seed), [*kept, f"seed={seed}"], self.folder.parent)

    def with_threads(self, threads: int) -> "Plan":
        """This plan with so many CPU threads, unless its configuration sets them."""
        if self.config.runtime.threads is not None:
            return self
        runtime = dataclasses.replace(self.config.runtime, threads=threads)
        return dataclasses.replace(self, config=dataclasses.replace(self.config, runtime=runtime))


def plan(config: Config, folder: Path, command: Iterable[str]) -> Plan:
    """The plan of a configuration.

    Args:
        command: the command line, for the record.

    Raises:
        UserError: the configuration asks for something that does not exist or fit.
    """
    check(config)
    return Plan(config, folder, tuple(command))


def resolve_one(overrides: Sequence[str], config_dir: Path | None = None) -> Plan:
    """The plan of one run."""
    from posbench.config import compose  # Hydra, which a rank does not need

    config = compose.single(list(overrides), config_dir)
    options = ["--config-dir", str(config_dir)] if config_dir else []
    return plan(config, run_folder(config), ["posbench", "train", *options, *overrides])


def resolve(sets: list[list[str]], config_dir: Path | None = None) -> list[Plan]:
    """The plans of all combinations of all sets of overrides, each run once however often it is named."""
    from posbench.config import compose

    found: dict[str, Plan] = {}
    for overrides, config in compose.combinations(sets, config_dir):
        new = plan(config, run_folder(config), ["posbench", "train", *overrides])
        known = found.setdefault(new.id, new)
        if known.folder != new.folder:
            raise UserError(f"{known.folder} and {new.folder} are one run: a sweep keeps each in one folder")
    return list(found.values())


def by_study(todo: Iterable[Plan]) -> dict[Path, list[Plan]]:
    """Plans by the folder that their study's runs share."""
    found: dict[Path, list[Plan]] = {}
    for one in todo:
        found.setdefault(one.folder.parent, []).append(one)
    return found


# -- sweep files -------------------------------------------------------------------------------------------------------


def read_sets(name: str | None, overrides: list[str], config_dir: Path | None = None) -> list[list[str]]:
    """The sets of overrides that `sweep=name` and the command line ask for together.

    A sweep file holds `sets`, a list of override sets, and `shared`, a list of overrides for all of them. The command
    line takes the place of what is shared under the same key, and adds to the rest.

    Raises:
        UserError: no such sweep, a file of another form, or an override of what the sets themselves choose.
    """
    if name is None:
        return [overrides]
    path = chosen("sweep", name, config_dir)
    sets, shared = _parts(path)
    given = {_key(override) for override in overrides}
    for one in sets:
        refuse_twice((_key(override) for override in [*shared, *one]), f"{path}: ")
        if clash := next((override for override in one if _key(override) in given), None):
            raise UserError(
                f"sweep={name} has its own '{clash}': leave {_key(clash)} out, or copy {path} and change it"
            )
    kept = [override for override in shared if _key(override) not in given]
    return [[*kept, *overrides, *one] for one in sets]


def _parts(path: Path) -> tuple[list[list[str]], list[str]]:
    content = plain_yaml.load(path)
    if not isinstance(content, dict) or not content.get("sets"):
        raise UserError(f"{path} is not a sweep: expected 'sets', a list such as '- encoding=rope,alibi'")
    for key, value in content.items():
        lines = value if isinstance(value, list) else [None]
        if key not in ("sets", "shared") or not all(isinstance(line, str) for line in lines):
            raise UserError(f"{path}: {key} is {value!r}: expected 'sets' and 'shared', lists of overrides")
    try:
        sets = [shlex.split(line) for line in content["sets"]]
        return sets, [override for line in content.get("shared", []) for override in shlex.split(line)]
    except ValueError as error:  # a quotation mark without its partner
        raise UserError(f"{path}: {str(error).lower()}") from None


def _key(override: str) -> str:
    return full_key(override.partition("=")[0])
