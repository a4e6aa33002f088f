"""The YAML files that come with posbench."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from posbench.errors import unknown

GROUPS = ("encoding", "model", "data", "training", "evaluation", "tracking", "experiment")  # of a run's configuration


def configs_dir() -> Path:
    """Where the YAML files are: inside the package when installed from a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    packaged = package / "_configs"
    return packaged if packaged.is_dir() else package.parent / "configs"


def choices(group: str, folders: Sequence[Path] = ()) -> dict[str, Path]:
    """What can be chosen in a group, by name, sorted: its files, without those that others only build upon (`_base`).

    Args:
        folders: of further groups and files, as --config-dir; their files come first.
    """
    files = {path.stem: path for path in _files(group, "[!_]*.yaml", folders)}
    return dict(sorted(files.items()))


def nested(group: str, folders: Sequence[Path] = ()) -> dict[str, Path]:
    """What can be chosen in folders within a group, by the name that is typed: `task/copy`."""
    files = {f"{path.parent.name}/{path.stem}": path for path in _files(group, "*/[!_]*.yaml", folders)}
    return dict(sorted(files.items()))


def _files(group: str, pattern: str, folders: Sequence[Path]) -> Iterator[Path]:
    """The files of a group; of those with one name the last one stands above the others."""
    for folder in (configs_dir(), *reversed(folders)):
        yield from (folder / group).glob(pattern)


def chosen(group: str, name: str, own: Path | None = None) -> Path:
    """The file of one choice. Raises UserError if there is no such choice."""
    files = choices(group, [own] if own else [])
    if name not in files:
        raise unknown(group, name, files, f"choices: {', '.join(files)}")
    return files[name]
