"""Turn key=value words into configurations. The first mistake in them raises a
UserError of one line.

Keys and names of files are checked first, and all points are composed before one is
built: a mistake in typing waits neither for Hydra nor for torch.
"""

import dataclasses
import itertools
from pathlib import Path

from posbench.config.overrides import (
    KEYS,
    LENGTH,
    OF_A_SWEEP,
    WORDS,
    by_key,
    unknown_key,
    values,
)
from posbench.config.schema import Config
from posbench.config.shipped import GROUPS, choices, chosen_files
from posbench.errors import UserError
from posbench.run import start
from posbench.typed import rewritten

# where encodings, tasks and data sets have keys of their own
_OPEN = ("encoding.", "data.task.", "data.splits.")
# only a group sets these
_WITH_OPTIONS = ("encoding.name", "data.source", "data.task", "data.task.name")


def single(
    words: list[str], config_dir: Path | None = None, digests: bool = False
) -> Config:
    """Return the configuration of one run. The arguments are those of `configs`."""
    return configs(words, config_dir, digests, several=False)[0][1]


def configs(
    words: list[str],
    config_dir: Path | None = None,
    digests: bool = False,
    several: bool = True,
) -> list[tuple[list[str], Config]]:
    """Return the words and the configuration of each combination of values.

    Args:
        words: key=value.
        config_dir: has further YAML files.
        digests: whether to find a text and a tokenizer that are files of the user, and
            give the configuration their digests.
        several: whether a key may have several values.
    """
    folders: tuple[Path, ...] = ()
    if config_dir:
        if not config_dir.is_dir():
            raise UserError(f"{config_dir}: expected a folder of YAML files")
        folders = (config_dir.absolute(),)
    axes = axes_of(words, folders)
    for key, texts in axes.items():
        if len(texts) > 1 and not several:
            raise UserError(
                f"{key}={by_key(words)[key]} gives several values: 'posbench sweep'"
                " runs each of them"
            )

    from posbench.launch import point  # it imports Hydra

    if folders:
        point.hydra_config.cache_clear()  # their files may have changed
    configurations = []
    for combination in itertools.product(*axes.values()):
        typed = dict(zip(axes, combination, strict=True))
        words = [f"{key}={text}" for key, text in typed.items()]
        configurations.append((words, point.config_of(typed, folders)))
    if digests:
        from posbench.data.sources import identified  # it imports pyarrow

        for place, (words, config) in enumerate(configurations):
            known = dataclasses.replace(config, data=identified(config.data))
            configurations[place] = words, known
    for _, config in configurations:  # from here on it takes torch
        point.check(config)
    return configurations


def axes_of(words: list[str], folders: tuple[Path, ...]) -> dict[str, list[str]]:
    """Return what is typed, by full key, each with its values. Raises UserError for an
    unknown key, or a choice that has no file.
    """
    axes = {}
    by_typed_key = by_key(words)
    for key, text in by_typed_key.items():
        if key == "start":
            axes[key] = start.folders_of(text)
        elif key == "encoding" and text == "all":
            axes[key] = list(choices(key, folders))
        else:
            axes[key] = [rewritten(text, item) for item in values(key, text)]

        is_key = key in KEYS or key.startswith(_OPEN)
        # beside a start an encoding may have options in its word: `point` reads them
        is_spelt_out = key == "encoding" and "start" in by_typed_key
        if is_spelt_out:
            continue
        if key in GROUPS:
            for choice in axes[key]:
                chosen_files({key: choice}, folders)
        elif key in _WITH_OPTIONS or not (is_key or key in (LENGTH, "start")):
            raise unknown_key(key, [*KEYS, *GROUPS], (*WORDS, *OF_A_SWEEP))
    return axes
