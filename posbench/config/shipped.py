"""The YAML files of posbench and of folders that add to it: find them, and read one as
plain data.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posbench.errors import UserError, nearest

# in a configuration
GROUPS = (
    "encoding",
    "model",
    "data",
    "training",
    "evaluation",
    "tracking",
    "experiment",
)
# Globs for a group's own files, for those in folders within it (typed as task/copy),
# and for both.
PLAIN, NESTED, EVERY = "[!_]*.yaml", "*/[!_]*.yaml", "**/[!_]*.yaml"
_SYNONYMS = {
    "rotary": "rope",
    "nope": "none",
    "null": "none",
    "off": "none",
    "false": "none",
    "absolute": "learned",
    "online": "tracking.mode=online",
    "offline": "tracking.mode=offline",
}


def configs_dir() -> Path:
    """Return the folder of the YAML files: inside the package when installed from a
    wheel, beside it in a checkout.
    """
    package = Path(__file__).resolve().parent.parent
    return (
        packaged
        if (packaged := package / "_configs").is_dir()
        else package.parent / "configs"
    )


def choices(
    group: str, folders: Sequence[Path] = (), pattern: str = PLAIN
) -> dict[str, Path]:
    """Return a group's files by name. If several folders have a name, the first
    counts.
    """
    roots = [folder / group for folder in (configs_dir(), *reversed(folders))]
    return dict(
        sorted(
            {
                str(p.relative_to(r).with_suffix("")): p
                for r in roots
                for p in r.glob(pattern)
            }.items()
        )
    )


def choice_file(
    group: str, name: str, folders: Sequence[Path] = (), classes: Sequence[str] = ()
) -> Path:
    """Return the file of one choice. Raises UserError if there is none; `classes` are
    choices without files.
    """
    if path := (files := choices(group, folders, EVERY)).get(name):
        # Hydra reads that one
        if (
            path != (shipped := configs_dir() / group / f"{name}.yaml")
            and shipped.is_file()
        ):
            raise UserError(
                f"{path}: posbench has a file of this name: give yours another"
            )
        return path
    hint = (
        "'posbench list' shows all"
        if group == "encoding"
        else f"choices: {', '.join(files)}"
    )
    of_texts = (
        "a text of your own is data.path=..., one of the hub data.dataset=OWNER/NAME; "
        * (group == "data")
    )
    close = _SYNONYMS.get(name.lower()) or nearest(name, [*files, *classes], 0.6)
    raise UserError(
        f"unknown {group} '{name}'{f': did you mean {close!r}?' if close else ''}"
        f" ({of_texts}{hint})"
    )


def load(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file, as plain data. Raises UserError if it cannot
    be read or is no mapping.
    """
    import yaml

    try:  # the parser in C takes a tenth of the time; PyYAML may be built without it
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        content = yaml.load(path.read_bytes(), Loader=loader)  # noqa: S506
    # ValueError: an impossible date
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected keys with values")
    return content
