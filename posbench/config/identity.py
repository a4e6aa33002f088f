"""Which run a configuration is: a name that survives new keys, and the folder it goes by."""

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

from posbench.config.external import AnyConfig, digest
from posbench.config.history import without_neutral
from posbench.config.schema import Config, to_container

# What may change without making it another run.
NOT_IDENTITY = ("study", "tracking", "evaluation", "runtime")
_ASIDE = re.compile(r".+\.old-\d+")


def run_id(config: AnyConfig) -> str:
    """`<encoding>-s<seed>-<8 hex digits>`, the digits from everything that shapes the trained weights.

    Keys that came later count only where they are not neutral (`config.history`), so they rename no earlier run.
    """
    if not isinstance(config, Config):
        return config.id
    if config.start:
        config = dataclasses.replace(config, start=dataclasses.replace(config.start, run=""))
    shaping = without_neutral(to_container(config))
    identity = {key: one_number(value) for key, value in shaping.items() if key not in NOT_IDENTITY}
    return f"{config.encoding.name}-s{config.seed}-{digest(identity)}"


def run_folder(config: Config, study: Path | None = None) -> Path:
    """The run's folder in a study's, its own unless another is given."""
    return (study or Path(config.runtime.outputs) / config.study) / run_id(config)


def moved_aside(name: str) -> bool:
    """Whether a folder has the name that `--restart` gives to an earlier run: `<run>.old-1`."""
    return _ASIDE.fullmatch(name) is not None


def is_one_run(one: AnyConfig, other: AnyConfig) -> bool:
    """Whether two configurations ask for the same weights, however their paths are spelt."""
    if isinstance(one, Config) and isinstance(other, Config):
        one, other = in_one_spelling(one), in_one_spelling(other)
    return run_id(one) == run_id(other)


def in_one_spelling(config: Config) -> Config:
    """The configuration with each path to text or a tokenizer spelt in one way, so that one file makes one run.

    A path below the current folder becomes relative to it, any other absolute.
    """

    def one(path: str | None, is_path: bool) -> str | None:
        here = os.path.expanduser(path) if path else path
        is_here = here and (is_path or os.path.exists(here))  # else it is a name: on the hub, or bpe
        return _relative(here) if here and is_here else path

    data = config.data
    path, dataset, tokenizer = one(data.path, True), one(data.dataset, False), one(data.tokenizer, False)
    spelt = dataclasses.replace(data, path=path, dataset=dataset, tokenizer=tokenizer or data.tokenizer)
    return dataclasses.replace(config, data=spelt)


def _relative(path: str) -> str:
    """Relative to the current folder, by its real name or the one that the shell has for it; absolute outside of it."""
    absolute = Path(os.path.abspath(path))
    for folder in (Path.cwd(), Path(os.environ.get("PWD") or "/")):
        if absolute.is_relative_to(folder) and os.path.samefile(folder, "."):
            return absolute.relative_to(folder).as_posix()
    return str(absolute)


def one_number(value: Any) -> Any:
    """10000 and 10000.0 are one value, so that `encoding.base=1e4` is the run that `encoding.base=10000` is."""
    if isinstance(value, dict):
        return {key: one_number(item) for key, item in value.items()}
    if isinstance(value, list):
        return [one_number(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
