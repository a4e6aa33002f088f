"""Event files for TensorBoard in the run folder: all rows, written anew each
session.
"""

import shutil
from collections.abc import Mapping
from typing import Any

from posbench.config.schema import Config
from posbench.run.folder import Run
from posbench.tracking.session import CONTEXT


class TensorBoard:
    """A session that is a folder of event files."""

    starting_step = 0

    def __init__(self, config: Config, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "tensorboard"
        shutil.rmtree(folder, ignore_errors=True)
        self.url = str(folder)
        self._writer = SummaryWriter(self.url)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        axis = values.get(CONTEXT, values.get("tokens"))
        for name, scalar in values.items():
            if "/" in name and name != CONTEXT:
                self._writer.add_scalar(name, scalar, axis)
        self._writer.flush()

    def finish(self, status: str, facts: Mapping[str, Any]) -> None:
        self._writer.close()
