"""Plans: what a command line asks for, checked and resolved; only the machine that
trains may still refuse it.
"""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from posbench.config.overrides import begins, by_key, setting_of, shell_words, split
from posbench.config.schema import Config, Section, refuse_uneven, validate
from posbench.config.shipped import choice_file, load
from posbench.errors import UserError

_TEXTS = ("data", "data.path", "data.dataset")  # keys that choose a text


class SweepFile(Section):
    """A file of a sweep: lines of words, and words for all of them."""

    sets: list[str]
    shared: list[str] = dataclasses.field(default_factory=list)


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


def from_config(
    config: Config, words: Iterable[str], config_dir: Path | None = None
) -> Plan:
    """Return the plan of a configuration and of the words that gave it. Raises
    UserError if parts of it do not fit.
    """
    # these import torch, which a mistake in typing need not wait for
    from posbench.evaluation.requests import check
    from posbench.processes import size_of

    check(config)
    size = size_of(config.runtime.processes)
    refuse_uneven("training.batch_size", config.training.batch_size, size, "processes")
    command = ["posbench", "train", *words]
    if config_dir:
        command.append(f"--config-dir={config_dir}")
    return Plan(config, config.folder, tuple(command))


def resolve_one(words: list[str], config_dir: Path | None = None) -> Plan:
    """Return the plan of one run; UserError if a new one would have no row with one of
    its extensions. A sweep's encodings need not all have one.
    """
    from posbench.launch import compose  # it imports Hydra, which a rank does not need

    config = compose.single(words, config_dir, digests=True)
    plan = from_config(config, words, config_dir)
    if not plan.folder.exists():
        from posbench.evaluation.requests import refuse_missing_extensions

        refuse_missing_extensions(config)
    return plan


def resolve(sets: list[list[str]], config_dir: Path | None = None) -> list[Plan]:
    """Return the plans of all combinations of all sets of overrides, each run once
    however often it is named.
    """
    from posbench.launch import compose

    plans: dict[str, Plan] = {}
    for overrides in sets:
        for words, config in compose.configs(overrides, config_dir, digests=True):
            plan = from_config(config, words, config_dir)
            first_plan = plans.setdefault(plan.id, plan)
            if first_plan.folder != plan.folder:
                raise UserError(
                    f"{first_plan.folder} and {plan.folder} are the same run:"
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
    folders = [config_dir] if config_dir else []
    path = choice_file("sweep", name, folders)
    try:
        file = validate(SweepFile, load(path))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if not file.sets:
        raise UserError(
            f"{path}: sets is empty: expected a list such as '- encoding=rope,alibi'"
        )

    shared = shell_words(" ".join(file.shared), str(path))
    typed = by_key(overrides)
    if not typed.keys().isdisjoint(_TEXTS):  # the file's study is for another text
        shared = [word for word in shared if split(word)[0] != "study"]
    found = []
    for line in file.sets:
        words = [*shared, *shell_words(line, str(path)), *overrides]
        is_begun = begins(words)
        by_setting = {setting_of(word, is_begun): word for word in words}
        found.append(list(by_setting.values()))
    return found
