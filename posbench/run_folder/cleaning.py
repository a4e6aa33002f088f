"""`posbench clean`: free the disk space of what a finished run no longer needs: older checkpoints, optimizer states."""

from pathlib import Path

from posbench.config.external import TrainedElsewhere
from posbench.errors import InUse
from posbench.run_folder import checkpoint
from posbench.run_folder.folder import Run, load_any_config, load_record


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
