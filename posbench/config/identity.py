"""Which run a configuration is: a name that survives new keys, and the folder it goes by."""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posbench import files
from posbench.config.external import AnyConfig, digest
from posbench.config.history import without_neutral
from posbench.config.schema import SAVED, Config, to_container
from posbench.errors import UserError

# What may change without making it another run. Version 1 of the digest counted the study as well.
NOT_IDENTITY = ("study", "tracking", "evaluation", "runtime")
VERSIONS = (2, 1)  # of the digest, the current one first
_LARGEST_RECORD = 2**24  # bytes of a run.json


def run_id(config: Config, version: int = VERSIONS[0], former: bool = False) -> str:
    """`<encoding>-s<seed>-<8 hex digits>`, the digits from everything that shapes the trained weights.

    Keys that came later count only where they are not neutral (`config.history`), so they rename no earlier run.

    Args:
        former: count older options of inner encodings that have their former defaults. A run that was given one at that
            time has this name.
    """
    if config.start:
        config = dataclasses.replace(config, start=dataclasses.replace(config.start, run=""))
    left_out = NOT_IDENTITY if version > 1 else tuple(name for name in NOT_IDENTITY if name != "study")
    shaping = without_neutral(to_container(config), inner=not former)
    identity = {key: _one_number(value) for key, value in shaping.items() if key not in left_out}
    return f"{config.encoding.name}-s{config.seed}-{digest(identity)}"


def run_ids(config: AnyConfig) -> tuple[str, ...]:
    """All names that the run has gone by, each once, the current one first."""
    if not isinstance(config, Config):
        return (config.id,)
    names = [run_id(config, version, former) for former in (False, True) for version in VERSIONS]
    return tuple(dict.fromkeys(names))


def run_folder(config: Config, study: Path | None = None) -> Path:
    """The run's folder in a study's, its own unless another is given: where it is under any of its names, or will be.

    A run from before a change of the digest is found by its old name, and continues there.
    """
    study = study or Path(config.runtime.outputs) / config.study
    if not study.is_dir():
        return study / run_id(config)
    folders = [study / name for name in run_ids(config)]
    return next((folder for folder in folders if (folder / SAVED).is_file()), folders[0])


def is_one_run(one: AnyConfig, other: AnyConfig) -> bool:
    """Whether two configurations ask for the same weights, however their paths are spelt."""
    if not isinstance(one, Config) or not isinstance(other, Config):
        return run_ids(one) == run_ids(other)
    return run_id(_spelt(one, _relative)) == run_id(_spelt(other, _relative))


def in_one_spelling(config: Config, study: Path | None = None) -> Config:
    """The configuration with each path to text or a tokenizer spelt in one way, so that one file makes one run.

    Below the current folder it is relative to it, else absolute. Where a run already stands under the spelling that was
    given, or under absolute paths, its own spelling is kept: it is that run. A run from before `data.test_pieces` is
    kept, too, if its text is split no other way by it.

    Args:
        study: the folder that the run is looked for in, the configuration's own unless another is given.
    """
    one = _spelt(config, _relative)
    spellings = [one, *(each for each in (config, _spelt(config, os.path.abspath)) if each != one)]
    before = [dataclasses.replace(each, data=dataclasses.replace(each.data, test_pieces=None)) for each in spellings]
    wanted = config.data.test_pieces
    if found := next((each for each in spellings if (run_folder(each, study) / SAVED).is_file()), None):
        return found
    return next((each for each in before if wanted and _splits_alike(run_folder(each, study), wanted)), one)


def _splits_alike(folder: Path, test_pieces: int) -> bool:
    """Whether a run's folder says that its text has splits of its own, or so many test documents anyway."""
    try:
        data = json.loads(files.read(folder / "run.json", _LARGEST_RECORD))["data"]
        enough = data["split"] == "document" and data["documents"]["test"] >= test_pieces
        return bool(data["split"] == "given" or enough)
    except (OSError, UserError, ValueError, KeyError, TypeError, RecursionError):  # no run, or none that knows its text
        return False


def _spelt(config: Config, spell: Callable[[str], str]) -> Config:
    def one(path: str | None, is_path: bool) -> str | None:
        here = os.path.expanduser(path) if path else path
        return spell(here) if here and (is_path or os.path.exists(here)) else path  # else a name: on the hub, or bpe

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


def _one_number(value: Any) -> Any:
    """10000 and 10000.0 are one value, so that `encoding.base=1e4` is the run that `encoding.base=10000` is."""
    if isinstance(value, dict):
        return {key: _one_number(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_one_number(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
