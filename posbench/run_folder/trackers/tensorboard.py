"""Event files for TensorBoard in the run folder, `tensorboard/`, by torch's own writer.

The step of a training's row is `tokens`, that of an evaluation's row `eval/length`, both in tokens. TensorBoard appends
only. So a session begins by emptying the event files of earlier ones and writing all records anew. The empty files
stay, because a TensorBoard that is open stops at a file that is gone; `purge_step=0` makes it drop what it has read. It
reads files in the order of their names, which begin with the second of their making: a session waits for a later second
than that of the newest file. A kill neither loses nor doubles a row.
"""

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from posbench.config.schema import flat
from posbench.run_folder.logged import LENGTH, LENGTH_RATIO, LINE
from posbench.run_folder.trackers.base import Row, TrackedRun

_EVENTS = "events.out.tfevents."  # followed by the time in seconds, the host, the process and a counter
_OF_A_RUN = ("study", "seed", "encoding", "model", "data", "training")  # sections shown beside the summary


class TensorBoard:
    """The tracker `tensorboard`."""

    def __init__(self, run: TrackedRun, rows: Sequence[Row]) -> None:
        folder = run.folder / "tensorboard"
        folder.mkdir(exist_ok=True)
        earlier = list(folder.glob(f"{_EVENTS}*"))
        for path in earlier:
            _empty(path)
        if str(int(time.time())) in {path.name.removeprefix(_EVENTS).partition(".")[0] for path in earlier}:
            time.sleep(1 - time.time() % 1)
        self._config, self._summary = run.config, dict[str, Any]()
        self._writer = SummaryWriter(str(folder), purge_step=0)
        self._writer.add_text("config", _as_code(yaml.safe_dump(run.config, sort_keys=False)))
        for row in sorted(rows, key=lambda row: row.get(LENGTH, 0)):  # a line is drawn in the order of writing
            self._add(row)
        self._writer.flush()

    def log(self, row: Row) -> None:
        self._add(row)
        self._writer.flush()

    def summary(self, values: Mapping[str, Any]) -> None:
        self._summary |= values

    def finish(self, status: str) -> None:
        """Write the summary: numbers as scalars, all of it as text, and both with the configuration under HPARAMS."""
        numbers = {name: float(value) for name, value in self._summary.items() if isinstance(value, int | float)}
        for name, value in numbers.items():
            self._writer.add_scalar(name, value)
        self._writer.add_text("summary", _as_code(yaml.safe_dump(self._summary, sort_keys=False)))
        shown = flat({name: self._config[name] for name in _OF_A_RUN})
        plain = {name: value if isinstance(value, bool | int | float) else str(value) for name, value in shown.items()}
        writer = self._writer.file_writer
        assert writer is not None  # as long as it is not closed
        for part in hparams(plain, numbers):
            writer.add_summary(part)
        self._writer.close()

    def _add(self, row: Row) -> None:
        step = row.get(LENGTH, row.get("tokens"))
        for name, value in row.items():
            if "/" in name and name not in (LENGTH, LENGTH_RATIO, LINE):
                self._writer.add_scalar(re.sub(r"[^-/\w.]", "_", name), value, step)  # the letters that a tag has


def _empty(path: Path) -> None:
    """Leave nothing in a file; what is no file, such as a stranger's link, is removed."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK))
    except OSError:
        path.unlink()


def _as_code(text: str) -> str:
    """Text that Markdown leaves as it is."""
    return "".join(f"    {line}\n" for line in text.splitlines())
