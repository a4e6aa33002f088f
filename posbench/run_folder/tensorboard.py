"""Event files for TensorBoard in the run folder, `tensorboard/`, by torch's own writer.

The step of a training's row is `tokens`, that of an evaluation's row `eval/length`, both in tokens. TensorBoard appends
only. So a session begins by emptying the event files of earlier ones and writing all records anew. The empty files
stay, because a TensorBoard that is open stops at a file that is gone; `purge_step=0` makes it drop what it has read. It
reads files in the order of their names, which begin with the second of their making: a session waits for a later second
than that of the newest file. A kill neither loses nor doubles a row.
"""

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from posbench.run_folder.logged import LENGTH, LENGTH_RATIO, LINE

_EVENTS = "events.out.tfevents."  # followed by the time in seconds, the host, the process and a counter


class TensorBoard:
    """A session of a run: shows these rows of its folder, then those of `log`."""

    def __init__(self, run: Path, rows: Sequence[Mapping[str, Any]]) -> None:
        folder = run / "tensorboard"
        folder.mkdir(exist_ok=True)
        earlier = list(folder.glob(f"{_EVENTS}*"))
        for path in earlier:
            path.write_bytes(b"")
        if str(int(time.time())) in {path.name.removeprefix(_EVENTS).partition(".")[0] for path in earlier}:
            time.sleep(1 - time.time() % 1)
        self._writer = SummaryWriter(str(folder), purge_step=0)
        for row in sorted(rows, key=lambda row: row.get(LENGTH, 0)):  # a line is drawn in the order of writing
            self._add(row)
        self._writer.flush()

    def log(self, row: Mapping[str, Any]) -> None:
        """Show one more row."""
        self._add(row)
        self._writer.flush()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the numbers of the summary and close the files."""
        for name, value in summary.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, float(value))
        self._writer.close()

    def _add(self, row: Mapping[str, Any]) -> None:
        step = row.get(LENGTH, row.get("tokens"))
        for name, value in row.items():
            if "/" in name and name not in (LENGTH, LENGTH_RATIO, LINE):
                self._writer.add_scalar(re.sub(r"[^-/\w.]", "_", name), value, step)  # the letters that a tag has
