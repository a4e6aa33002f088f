"""What a tracker is: the few calls by which CSV files, TensorBoard or an installed package show a run.

A package adds a tracker by an entry point of the group `posbench.trackers`, name -> class (docs/tracking.md).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

Row = Mapping[str, Any]  # names and numbers, see `run_folder.logged`


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """The facts of a run that a tracker gets."""

    id: str  # the same in every session of the run
    folder: Path  # of the run; a tracker that writes files has a folder of its own name in it
    config: dict[str, Any]  # every key of config.yaml; tracking has project, entity, group and tags


class Tracker(Protocol):
    """A session of a run, from one start of a command to its end; a run that is resumed has several.

    All calls come from one background thread. What a tracker raises costs a warning and the rest of its session, never
    the run; the next command on the run opens another session.
    """

    def __init__(self, run: TrackedRun, rows: Sequence[Row]) -> None:
        """Open a session.

        Args:
            rows: all that the run folder has by now, each once. An earlier session that was killed may have shown more,
                since the run repeats what came after its last checkpoint, or less. A tracker that shows exactly these
                rows, and then those of `log`, neither loses nor doubles any.
        """

    def log(self, row: Row) -> None:
        """Show one more row, which the run folder has already."""

    def summary(self, values: Mapping[str, Any]) -> None:
        """Show values that describe the whole run; each replaces an earlier one of its name."""

    def finish(self, status: str) -> None:
        """End the session: write or send what is left. The status is that of run.json: done, failed, stopped ..."""
