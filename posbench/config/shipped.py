"""YAML files: those that come with posbench, those beside them, and any of them as plain data."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posbench.errors import UserError, unknown

GROUPS = ("encoding", "model", "data", "training", "evaluation", "tracking", "experiment")  # of a run's configuration
# Files of a group, those in folders within it by the name that is typed, task/copy, and both.
PLAIN, NESTED, EVERY = "[!_]*.yaml", "*/[!_]*.yaml", "**/[!_]*.yaml"


def configs_dir() -> Path:
    """Return where the YAML files are: inside the package when installed from a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    return packaged if (packaged := package / "_configs").is_dir() else package.parent / "configs"


def choices(group: str, folders: Sequence[Path] = (), pattern: str = PLAIN) -> dict[str, Path]:
    """Return the files of a group by name; of one name in several folders, as of --config-dir, the first holds."""
    roots = [folder / group for folder in (configs_dir(), *reversed(folders))]
    return dict(sorted((str(p.relative_to(r).with_suffix("")), p) for r in roots for p in r.glob(pattern)))


def chosen(group: str, name: str, own: Path | None = None) -> Path:
    """Return the file of one choice. Raises UserError if there is no such choice."""
    files = choices(group, [own] if own else [])
    if name not in files:
        raise unknown(group, name, files, f"choices: {', '.join(files)}")
    return files[name]


def load(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file, as plain data. Raises UserError if it cannot be read, or is something else."""
    import yaml

    try:  # the parser in C takes a tenth of the time; a PyYAML built without it has the one in Python
        content = yaml.load(path.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that is none
        raise UserError(f"cannot read {path}: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected keys with values")
    return content
