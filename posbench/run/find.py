"""Find what a command line names (run folders, studies, globs, ids of runs, external
models).
"""

import glob
import re
from collections.abc import Collection
from pathlib import Path

from posbench.errors import UserError, did_you_mean
from posbench.run import MOVED_ASIDE, RECORD

_MODEL_FILES = ("config.json", "model.safetensors", "pytorch_model.bin")


def run_folders(paths: Collection[Path], or_else: str = "") -> list[Path]:
    """Return the run folders that folders, globs and ids name. Those moved aside
    (`.old-1`) count only where they are named themselves, and nothing else is.
    """
    if not paths:
        raise UserError("which runs? name their folders or ids, or their studies")
    folders: dict[Path, Path] = {}  # by their real paths: each once
    aside: dict[Path, Path] = {}
    for path in map(of_id, paths):
        matches = [path]
        if not path.exists():
            matches = list(map(Path, glob.glob(str(path))))
        if not matches:
            beside = [*path.parent.glob("[!.]*/"), *Path("outputs").glob("[!.]*/*/")]
            hint = did_you_mean(str(path), map(str, filter(_runs_in, beside)))
            if not hint:
                hint = (
                    ": expected run folders or study folders, such as outputs/demo, or"
                    f" ids of runs in outputs{or_else}"
                )
            raise UserError(f"{path} does not exist{hint}")
        for top in matches:
            for folder in _runs_in(top):
                folders[folder.resolve()] = folder
            if (top / RECORD).is_file() and MOVED_ASIDE.fullmatch(top.name):
                aside[top.resolve()] = top
    folders = folders or aside
    if not folders:
        raise UserError(
            f"no run folder in {', '.join(map(str, paths))}: expected folders with a"
            f" {RECORD} in them (what --restart moved aside is named itself)"
        )
    return sorted(folders.values())


def _runs_in(top: Path) -> list[Path]:
    """Return the run that a folder is, else the runs of a study, without nested ones
    such as tuning trials; else those of the studies in the folder. A run is not among
    them if it, or its study, was moved aside.
    """
    for pattern in (RECORD, f"[!.]*/{RECORD}", f"[!.]*/[!.]*/{RECORD}"):
        records = list(top.glob(pattern))
        runs = []
        for record in records:
            names = (record.parent.name, *record.relative_to(top).parts)
            if not any(map(MOVED_ASIDE.fullmatch, names)):
                runs.append(record.parent)
        if records:
            return runs
    return []


def run_folder(path: Path) -> Path:
    """Return the one run that a path or an id names. Raises UserError if it names none,
    or several.
    """
    folder, *others = run_folders([path])
    if others:
        raise UserError(f"{path} has several runs: name one, such as {folder}")
    return folder


def of_id(path: Path) -> Path:
    """Return the folder below `outputs` of the study with this name, of STUDY/RUN, or
    of the run with this id; a glob below `outputs` if anything there matches. Any other
    path is returned as it is, as is one with runs in it: a text that lies here may have
    the name of its study.
    """
    if path.is_absolute() or _runs_in(path):
        return path
    below = Path("outputs", path)
    if glob.glob(str(below)):
        return below
    # another study's run of that id is not meant
    if path.exists() or len(path.parts) != 1:
        return path
    records = Path("outputs").glob(f"*/{glob.escape(path.name)}/{RECORD}")
    folders = sorted(record.parent for record in records)
    if len(folders) > 1:
        raise UserError(
            f"several studies have a run {path}: name its folder,"
            f" {' or '.join(map(str, folders))}"
        )
    if not folders:
        return path
    return folders[0]


def is_model(word: str) -> bool:
    """Return whether a word of a command line names a HuggingFace model (folder or hub
    name) rather than runs.
    """
    path = Path(word)
    if path.exists():
        has_model = any((path / name).is_file() for name in _MODEL_FILES)
        return has_model and not (path / RECORD).exists()
    hub_name = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?", word, re.ASCII)
    if hub_name is None:
        return False
    return not Path(path.parts[0]).exists() and not Path("outputs", path).exists()
