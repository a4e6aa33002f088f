"""The YAML files of posbench and of folders that add to it: find them, and read one as
plain data.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posbench import encodings
from posbench.errors import UserError, nearest
from posbench.typed import PLACE

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
# numbers with eight or sixty as their base
_GUESSED = re.compile(r"[-+]?(0[0-9_]+|\d+(:[0-5]?\d)+)")
_SYNONYMS = {
    ("encoding", "rotary"): "rope",
    ("encoding", "nope"): "none",
    ("encoding", "absolute"): "learned",
    ("tracking", "online"): "tracking.mode=online",
    ("tracking", "offline"): "tracking.mode=offline",
}


def configs_dir() -> Path:
    """Return the folder of the YAML files: inside the package when installed from a
    wheel, beside it in a checkout.
    """
    package = Path(__file__).resolve().parent.parent
    packaged = package / "_configs"
    if packaged.is_dir():
        return packaged
    return package.parent / "configs"


def choices(
    group: str, folders: Sequence[Path] = (), pattern: str = PLAIN
) -> dict[str, Path]:
    """Return a group's files by name. If several folders have a name, the first
    counts.
    """
    files = {}
    for folder in (configs_dir(), *reversed(folders)):
        top = folder / group
        for path in top.glob(pattern):
            name = str(path.relative_to(top).with_suffix(""))
            files[name] = path
    return dict(sorted(files.items()))


def choice_file(
    group: str, name: str, folders: Sequence[Path] = (), classes: Sequence[str] = ()
) -> Path:
    """Return the file of one choice. Raises UserError if there is none; `classes` are
    choices without files.
    """
    files = choices(group, folders, EVERY)
    if name in files:
        path = files[name]
        shipped = configs_dir() / group / f"{name}.yaml"
        if path != shipped and shipped.is_file():  # Hydra reads that one
            raise UserError(
                f"{path}: posbench has a file of this name: give yours another"
            )
        return path

    names = [*files, *classes]
    message = f"unknown {group} '{name}'"
    close = _SYNONYMS.get((group, name.lower())) or nearest(name, names, 0.6)
    if close:
        message += f": did you mean '{close}'?"
    if group == "encoding":
        hint = "'posbench list' shows all"
    else:
        hint = f"choices: {', '.join(names)}"
    if group == "data":
        hint = (
            "a text of your own is data.path=..., one of the hub"
            f" data.dataset=OWNER/NAME; {hint}"
        )
    raise UserError(f"{message} ({hint})")


def chosen_files(
    groups: Mapping[str, str], folders: Sequence[Path] = ()
) -> dict[str, str]:
    """Return the choices, by group, that have a file: all but a class of an encoding
    without one. Raises UserError for a choice or a file of code that does not exist,
    and for numbers in a user's file that YAML reads as others: 010 as 8, 12:30 as 750.
    """
    files = dict(groups)
    name = groups.get("encoding", "")
    place = PLACE.fullmatch(name)
    if place and not Path(place[1]).expanduser().is_file():
        raise UserError(f"encoding={name}: there is no file {place[1]}")
    is_class = place or name in encodings.names()
    if is_class and name not in choices("encoding", folders, EVERY):
        del files["encoding"]
    for group, choice in files.items():
        classes = encodings.names() if group == "encoding" else ()
        path = choice_file(group, choice, folders, classes)
        if path.is_relative_to(configs_dir()):
            continue
        import yaml

        for token in yaml.scan(path.read_bytes()):
            if not isinstance(token, yaml.ScalarToken) or not token.plain:
                continue
            if _GUESSED.fullmatch(token.value):
                line = token.start_mark.line + 1
                raise UserError(
                    f"{path}, line {line}: YAML reads {token.value} as another number:"
                    " write that, or put it into quotation marks"
                )
    return files


@functools.cache
def _loader() -> Any:
    """Return PyYAML's safe loader, which here refuses a key that stands twice: it would
    take the last one.
    """
    import yaml

    # the parser in C takes a tenth of the time; PyYAML may be built without it
    safe: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(safe):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = set[str]()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in keys:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key '{key.value}' stands there twice",
                        problem_mark=key.start_mark,
                    )
                keys.add(str(key.value))
            return super().construct_mapping(node, deep)

    return Loader


def load(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file, as plain data. Raises UserError if it cannot
    be read or is no mapping, or if a key stands twice in it.
    """
    import yaml

    try:
        content = yaml.load(path.read_bytes(), Loader=_loader())  # noqa: S506
    # ValueError: an impossible date
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"cannot read {path}: {reason}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected keys with values")
    return content
