"""Find what a command line names (run folders, studies, globs, ids of runs, external
models).
"""

import glob
import re
from collections.abc import Collection
from pathlib import Path

from posbench.config.identity import MOVED_ASIDE
from posbench.errors import UserError, did_you_mean
from posbench.run import RECORD


def run_folders(paths: Collection[Path], or_else: str = "") -> list[Path]:
    """Return the run folders that folders, globs and ids name, except those moved aside
    (`.old-1`).
    """
    folders: dict[Path, Path] = {}
    for path in map(of_id, paths):
        matches = (
            [path] if path.exists() else [Path(match) for match in glob.glob(str(path))]
        )
        if not matches:
            expected = (
                "expected run folders or study folders, such as outputs/demo, or ids of"
                " runs in outputs"
            )
            hint = did_you_mean(
                str(path),
                map(
                    str, [*path.parent.glob("[!.]*"), *Path("outputs").glob("[!.]*/*")]
                ),
            )
            raise UserError(f"{path} does not exist{hint or f': {expected}{or_else}'}")
        for top in matches:
            # The runs of a study, without nested ones such as tuning trials; else those
            # of the studies in a folder.
            levels = (
                [*top.glob(pattern)]
                for pattern in (RECORD, f"[!.]*/{RECORD}", f"[!.]*/[!.]*/{RECORD}")
            )
            for record in next(filter(None, levels), []):
                if not any(
                    map(
                        MOVED_ASIDE.fullmatch,
                        (record.parent.name, *record.relative_to(top).parts),
                    )
                ):
                    folders[record.parent.resolve()] = record.parent
    if not folders:
        raise UserError(
            f"no run folder in {', '.join(map(str, paths))}: expected folders with a"
            f" {RECORD} in them"
        )
    return sorted(folders.values())


def run_folder(path: Path) -> Path:
    """Return the one run that a path or an id names. Raises UserError if it names none,
    or several.
    """
    folder, *others = run_folders([path])
    if others:
        raise UserError(f"{path} has several runs: name one, such as {folder}")
    return folder


def of_id(path: Path) -> Path:
    """Return the folder below `outputs` of the run with this id. Any other path is
    returned as it is.
    """
    if len(path.parts) != 1 or path.exists():
        return path
    folders = sorted(
        record.parent
        for record in Path("outputs").glob(f"*/{glob.escape(path.name)}/{RECORD}")
    )
    if len(folders) > 1:
        raise UserError(
            f"several studies have a run {path}: name its folder,"
            f" {' or '.join(map(str, folders))}"
        )
    return folders[0] if folders else path


def is_model(word: str) -> bool:
    """Return whether a word of a command line names a HuggingFace model (folder or hub
    name) rather than runs.
    """
    path = Path(word)
    if path.exists():
        has_model = any(
            (path / name).is_file()
            for name in ("config.json", "model.safetensors", "pytorch_model.bin")
        )
        return has_model and not (path / RECORD).exists()
    hub_name = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?", word, re.ASCII)
    return hub_name is not None and not Path(path.parts[0]).exists()
