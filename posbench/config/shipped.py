"""The YAML files that come with posbench."""

from pathlib import Path

from posbench.errors import unknown

GROUPS = ("encoding", "model", "data", "training", "evaluation", "tracking", "experiment")  # of a run's configuration


def configs_dir() -> Path:
    """Where the YAML files are: inside the package when installed from a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    packaged = package / "_configs"
    return packaged if packaged.is_dir() else package.parent / "configs"


def choices(group: str, own: Path | None = None) -> dict[str, Path]:
    """What can be chosen in a group, by name, sorted: its files, without those that others only build upon (`_base`).

    Args:
        own: a folder of further groups and files, as --config-dir; its files come first.
    """
    folders = [configs_dir(), *([own] if own else [])]
    found = {path.stem: path for folder in folders for path in (folder / group).glob("[!_]*.yaml")}
    return dict(sorted(found.items()))


def nested(group: str) -> dict[str, Path]:
    """What can be chosen in folders within a group, by the name that is typed: `task/copy`."""
    found = (configs_dir() / group).glob("*/[!_]*.yaml")
    return {f"{path.parent.name}/{path.stem}": path for path in sorted(found)}


def chosen(group: str, name: str, own: Path | None = None) -> Path:
    """The file of one choice. Raises UserError if there is no such choice."""
    found = choices(group, own)
    if name not in found:
        raise unknown(group, name, found, f"choices: {', '.join(found)}")
    return found[name]
