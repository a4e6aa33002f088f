"""YAML files: those that come with posbench, those beside them, and any of them as plain data."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posbench.errors import UserError, unknown

GROUPS = ("encoding", "model", "data", "training", "evaluation", "tracking", "experiment")  # of a run's configuration


def configs_dir() -> Path:
    """Where the YAML files are: inside the package when installed from a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    packaged = package / "_configs"
    return packaged if packaged.is_dir() else package.parent / "configs"


def choices(group: str, folders: Sequence[Path] = (), pattern: str = "[!_]*.yaml") -> dict[str, Path]:
    """What can be chosen in a group, by name, sorted: its files, without those that others only build upon (`_base`).

    Args:
        folders: of further groups and files, as --config-dir; of files with one name theirs stand above ours.
        pattern: of the files' paths within the group.
    """
    roots = [folder / group for folder in (configs_dir(), *reversed(folders))]
    files = {str(path.relative_to(root).with_suffix("")): path for root in roots for path in root.glob(pattern)}
    return dict(sorted(files.items()))


def nested(group: str, folders: Sequence[Path] = ()) -> dict[str, Path]:
    """What can be chosen in folders within a group, by the name that is typed: `task/copy`."""
    return choices(group, folders, "*/[!_]*.yaml")


def every(group: str, folders: Sequence[Path] = ()) -> dict[str, Path]:
    """All that can be chosen in a group."""
    return choices(group, folders) | nested(group, folders)


def chosen(group: str, name: str, own: Path | None = None) -> Path:
    """The file of one choice. Raises UserError if there is no such choice."""
    files = choices(group, [own] if own else [])
    if name not in files:
        raise unknown(group, name, files, f"choices: {', '.join(files)}")
    return files[name]


def load(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file, as plain data. Raises UserError if it cannot be read, or holds something else."""
    import yaml

    try:  # the parser in C takes a tenth of the time; a PyYAML built without it has the one in Python
        content = yaml.load(path.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that is none
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"{path}{line}: {getattr(error, 'problem', None) or str(error).splitlines()[0]}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected keys with values")
    return content
