"""Delete run folders and prepared tokens. What else is in a study's folder stays:
reports, other files.
"""

from collections.abc import Collection
from pathlib import Path

from posbench import files
from posbench.errors import InUse
from posbench.run import RECORD
from posbench.run.find import run_folders
from posbench.run.run import in_use, load_record, owned


def deletable(paths: Collection[Path]) -> list[Path]:
    """Return the run folders that paths name. Raises InUse if a process has one."""
    folders = run_folders(paths)
    for folder in folders:
        if in_use(folder):
            raise InUse(f"{folder} is in use by another process: nothing was deleted")
    return folders


def unused_tokens(paths: Collection[Path]) -> list[Path]:
    """Return the folders of the user's cache with tokens of a text that no run has, of
    those that paths name; without paths of those in `outputs`.
    """
    folders = [record.parent for record in Path("outputs").glob(f"*/*/{RECORD}")]
    if paths:
        folders = run_folders(paths)
    texts = set()
    for folder in folders:
        data = load_record(folder)["data"] or {}
        texts.add(data.get("sha256"))
    unused = []
    for path in sorted(files.user_cache().glob("tokens/*/meta.json")):
        if files.read_json(path)["sha256"] not in texts:
            unused.append(path.parent)
    return unused


def delete(folders: Collection[Path]) -> None:
    """Delete folders. Each is renamed first: a kill leaves no half of a run."""
    for folder in folders:
        with owned(folder):
            files.delete(folder.rename(files.temporary(folder)))
