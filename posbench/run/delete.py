"""Delete run folders and prepared tokens. What else is in a study's folder stays:
reports, other files.
"""

import contextlib
from collections.abc import Collection
from pathlib import Path

from filelock import Timeout

from posbench import files
from posbench.data import tokens
from posbench.errors import InUse, UserError
from posbench.run import RECORD
from posbench.run.find import run_folders
from posbench.run.folder import in_use, owned
from posbench.run.saved import load_record


def deletable(paths: Collection[Path]) -> list[Path]:
    """Return the run folders that paths name. Raises InUse if a process has one."""
    folders = run_folders(paths)
    for folder in folders:
        if in_use(folder):
            raise InUse(f"{folder} is in use by another process: nothing was deleted")
    return folders


def unused_tokens(paths: Collection[Path]) -> list[Path]:
    """Return the folders of the user's cache with tokens of a text that no run has, of
    those that paths name; without paths of those in `outputs`. What a run of another
    project has used is not among them while that run exists. Damaged tokens are made
    again when a run needs them: no run has them.
    """
    folders = [record.parent for record in Path("outputs").glob(f"*/*/{RECORD}")]
    if paths:
        folders = run_folders(paths)
    texts = set()
    for folder in folders:
        texts.add(load_record(folder).text_sha256)
    cache = files.user_cache() / "tokens"
    files.remove_abandoned(cache)
    unused = []
    for path in sorted(cache.glob("[!.]*/meta.json")):
        users = tokens.runs_with(path.parent)
        is_used = any((run / RECORD).exists() for run in users)
        text = None
        with contextlib.suppress(UserError):
            text = files.read_json(path).get("sha256")
        if not is_used and (text is None or text not in texts):
            unused.append(path.parent)
    return unused


def delete(folders: Collection[Path]) -> None:
    """Delete run folders. Each is renamed first: a kill leaves no half of a run."""
    for folder in folders:
        with owned(folder):
            files.delete(folder.rename(files.temporary(folder)))


def delete_tokens(folders: Collection[Path]) -> None:
    """Delete tokens of the cache, as `delete` does. Raises InUse if a process makes
    them.
    """
    for folder in folders:
        try:
            with tokens.lock(folder, timeout=0.2):
                files.delete(folder.rename(files.temporary(folder)))
                files.delete(folder.with_name(f"{folder.name}.runs"))
        except Timeout:
            raise InUse(f"{folder} is in use by another process: try again") from None
