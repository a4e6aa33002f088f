"""Find what a command line names: run folders, study folders, globs, ids of runs, or an external model."""

import glob
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from posbench.config.identity import moved_aside
from posbench.errors import UserError

_OUTPUTS = Path("outputs")  # below which a run is found by its id
_ON_THE_HUB = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?", re.ASCII)


def run_folders(paths: Collection[Path], or_else: str = "") -> list[Path]:
    """Run folders under the given folders and globs, and of ids; those moved aside (`.old-1`) are left out.

    Args:
        or_else: what else a path that does not exist could have been, for the message.

    Raises:
        UserError: a path that does not exist, or no run folder at all.
    """
    found: dict[Path, Path] = {}
    for path in _globbed(paths, or_else):
        inside = [path] if (path / "run.json").is_file() else [p.parent for p in _records(path)]
        found |= {folder.resolve(): folder for folder in inside if not _aside(folder, path)}
    if not found:
        raise UserError(f"no run folder in {', '.join(map(str, paths))}: expected folders with a run.json in them")
    return sorted(found.values())


def of_id(path: Path) -> Path:
    """The folder below `outputs` of the run with this id; any other path as it is.

    Raises:
        UserError: several studies have a run of this id.
    """
    if len(path.parts) != 1 or path.exists():
        return path
    folders = sorted(record.parent for record in _OUTPUTS.glob(f"*/{glob.escape(path.name)}/run.json"))
    if len(folders) > 1:
        raise UserError(f"several studies have a run {path}: name its folder, {' or '.join(map(str, folders))}")
    return folders[0] if folders else path


def is_model(word: str) -> bool:
    """Whether a word of a command line names a HuggingFace model (folder or hub name) rather than runs."""
    path = Path(word)
    if path.exists():
        there = any((path / name).is_file() for name in ("config.json", "model.safetensors", "pytorch_model.bin"))
        return there and not (path / "run.json").exists()
    return bool(_ON_THE_HUB.fullmatch(word)) and not Path(path.parts[0]).exists()


def _globbed(paths: Iterable[Path], or_else: str) -> Iterator[Path]:
    for path in map(of_id, paths):
        matches = [path] if path.exists() else [Path(match) for match in sorted(glob.glob(str(path)))]
        if not matches:
            expected = "expected run folders or study folders, such as outputs/demo, or ids of runs in outputs"
            raise UserError(f"{path} does not exist: {expected}{or_else}")
        yield from (match for match in matches if match.is_dir())


def _records(folder: Path) -> list[Path]:
    """The runs of a study, without nested ones such as tuning trials; else those of the studies in the folder."""
    return sorted(folder.glob("[!.]*/run.json")) or sorted(folder.glob("[!.]*/[!.]*/run.json"))


def _aside(folder: Path, under: Path) -> bool:
    """Whether the folder, or a parent below what the user named, was moved aside."""
    inner = folder.relative_to(under).parts
    return any(moved_aside(part) for part in (*inner, folder.name))
