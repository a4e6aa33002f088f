"""The trackers: CSV files, TensorBoard, and those of installed packages. `base.py` says what a tracker is."""

from posbench import installed
from posbench.errors import UserError
from posbench.run_folder.trackers.base import Tracker


def load(name: str) -> type[Tracker]:
    """The class of a tracker, by its name among ours and the installed ones.

    Raises:
        UserError: it is no tracker.
        ImportError: its package, or one that it needs, is missing.
    """
    if name == "csv":
        from posbench.run_folder.trackers.csv_files import CsvFiles

        return CsvFiles
    if name == "tensorboard":
        from posbench.run_folder.trackers.tensorboard import TensorBoard

        return TensorBoard
    cls: type[Tracker] = installed.points(installed.TRACKERS)[name].load()
    if missing := [method for method in ("log", "summary", "finish") if not callable(getattr(cls, method, None))]:
        raise UserError(f"the installed tracker '{name}' is {cls!r}, which has no {missing[0]}: expected a Tracker")
    return cls
