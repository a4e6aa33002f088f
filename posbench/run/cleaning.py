"""Free disk space: `posbench clean` drops what finished runs no longer need, `posbench runs --delete` whole runs."""

from collections.abc import Iterable
from pathlib import Path

from posbench import files
from posbench.config.external import TrainedElsewhere
from posbench.errors import InUse, UserError
from posbench.run import checkpoint
from posbench.run.find import of_id
from posbench.run.names import CONFIG, RECORD
from posbench.run.run import Run, load_any_config, load_record, owned


def clean(folders: list[Path]) -> tuple[int, list[Path]]:
    """Delete what evaluation and reports do not read from finished runs; the newest weights stay.

    Returns:
        Bytes freed, and the folders that were left alone: unfinished, or owned by another process.

    Raises:
        UserError: a folder cannot be read as a run's.
    """
    freed, left = 0, []
    for folder in folders:
        config = load_any_config(folder)
        if load_record(folder).get("status") != "done":
            left.append(folder)
            continue
        try:
            with Run.open(folder, config, command=None) as run:
                if not isinstance(config, TrainedElsewhere):
                    freed += checkpoint.keep_weights(run.folder, config.training.steps)
        except InUse:
            left.append(folder)
    return freed, left


def delete(paths: Iterable[Path]) -> tuple[int, int]:
    """Delete runs, each named by its folder or its id; none of them if one cannot be deleted.

    Returns:
        How many they were, and the bytes freed.

    Raises:
        UserError: one of the paths is no run folder, has other runs in it, or is owned by another process.
    """
    freed, folders = 0, {}
    for path in map(of_id, paths):
        complete = not path.is_symlink() and all((path / name).is_file() for name in (CONFIG, RECORD))
        if not complete or "id" not in load_record(path):
            raise UserError(f"{path} is no run folder: nothing was deleted; expected runs, by their folders or ids")
        if other := next(path.glob(f"*/**/{RECORD}"), None):
            raise UserError(f"{path} has another run in it, {other.parent}: nothing was deleted")
        folders[path.resolve()] = path
        with owned(path.resolve()):
            pass
    for folder in folders:
        with owned(folder):
            freed += files.size(folder)
            files.delete(folder.rename(files.temporary(folder)))  # half a run is never left under its name
    return len(folders), freed
