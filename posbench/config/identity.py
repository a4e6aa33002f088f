"""Which run a configuration is: a name that survives new keys, and the folder it goes by."""

import dataclasses
import glob
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from posbench.config.history import without_neutral
from posbench.config.schema import Config, to_container
from posbench.errors import UserError

# What may change without making it another run.
NOT_IDENTITY = ("study", "tracking", "evaluation", "runtime")


def run_id(config: Any) -> str:
    """`<encoding>-s<seed>-<8 hex digits>`, the digits from everything that shapes the trained weights.

    Keys that came later count only where they are not neutral (`config.history`), so they rename no earlier run.
    A configuration of a model from elsewhere has an id of its own.
    """
    if not isinstance(config, Config):
        return str(config.id)
    encoding, start = dataclasses.replace(config.encoding, file=None), config.start
    start = start and dataclasses.replace(start, run="")
    config = dataclasses.replace(config, encoding=encoding, start=start)  # paths make no other run
    shaping = without_neutral(to_container(config))
    identity = {key: one_number(value) for key, value in shaping.items() if key not in NOT_IDENTITY}
    return f"{config.encoding.name}-s{config.seed}-{digest(identity)}"


def digest(shaping: dict[str, Any]) -> str:
    """The 8 hex digits at the end of an id, of all that numbers follow from."""
    text = json.dumps(shaping, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def one_number(value: Any) -> Any:
    """10000 and 10000.0 are one value, so that `encoding.base=1e4` is the run that `encoding.base=10000` is."""
    if isinstance(value, dict):
        return {key: one_number(item) for key, item in value.items()}
    if isinstance(value, list):
        return [one_number(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def run_folder(config: Config, study: Path | None = None) -> Path:
    """The run's folder in a study's, its own unless another is given."""
    return (study or Path(config.runtime.outputs) / config.study) / run_id(config)


def moved_aside(name: str) -> bool:
    """Whether a folder has the name that `--restart` gives to an earlier run: `<run>.old-1`."""
    return re.fullmatch(r".+\.old-\d+", name) is not None


def with_paths(config: Config) -> Config:
    """The configuration with `~` expanded, and each path to text or a tokenizer spelt in one way: one file, one run.

    A path below the current folder becomes relative to it, any other absolute.
    """
    data, runtime = config.data, config.runtime
    path = spelt(data.path) if data.path else data.path
    names = {key: getattr(data, key) for key in ("dataset", "tokenizer")}  # also names on the hub, or bpe
    found: dict[str, Any] = {key: spelt(name) for key, name in names.items() if name and os.path.exists(expanded(name))}
    cache = None if runtime.cache is None else expanded(runtime.cache)
    return dataclasses.replace(
        config,
        data=dataclasses.replace(data, path=path, **found),
        runtime=dataclasses.replace(runtime, outputs=expanded(runtime.outputs), cache=cache),
    )


def expanded(path: str) -> str:
    """A path with `~` as the home folder. Raises UserError for an unknown user."""
    home = os.path.expanduser(path)
    if home.startswith("~") and not os.path.exists(home):
        raise UserError(f"'{path}': there is no user {path.partition('/')[0].lstrip('~')!r}; a file is ./{path}")
    return home


def is_there(path: str) -> bool:
    """Whether there is such a file, folder or glob."""
    path = os.path.expanduser(path)
    return os.path.exists(path) or any(glob.iglob(path, recursive=True))


def spelt(path: str) -> str:
    """Relative to the current folder, by its real name or the one that the shell has for it; absolute outside of it."""
    absolute = Path(os.path.abspath(expanded(path)))
    for folder in (Path.cwd(), Path(os.environ.get("PWD") or "/")):
        if absolute.is_relative_to(folder) and os.path.samefile(folder, "."):
            return absolute.relative_to(folder).as_posix()
    return str(absolute)
