"""Delete run folders. What else is in a study's folder stays: reports, other files."""

from collections.abc import Collection
from pathlib import Path

from posbench import files
from posbench.errors import InUse
from posbench.run.find import run_folders
from posbench.run.run import in_use, owned


def deletable(paths: Collection[Path]) -> list[Path]:
    """Return the run folders that paths name. Raises InUse if a process has one."""
    folders = run_folders(paths)
    for folder in folders:
        if in_use(folder):
            raise InUse(f"{folder} is in use by another process: nothing was deleted")
    return folders


def delete(folders: Collection[Path]) -> None:
    """Delete run folders. Each is renamed first: a kill leaves no half of a run."""
    for folder in folders:
        with owned(folder):
            files.delete(folder.rename(files.temporary(folder)))
