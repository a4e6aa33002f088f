"""What a tracker has to offer. Another tracker is another class with these methods."""

import os
from collections.abc import Mapping
from typing import Any, Protocol

CONTEXT = "eval/context"  # tokens: the axis of evaluation rows


class Session(Protocol):
    """A place where rows are shown; the run folder stays the record."""

    url: str  # where a reader finds it
    starting_step: int  # it has the rows before this one

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Show a row. All rows of the run come, in order, also those it has."""

    def finish(self, status: str, facts: Mapping[str, Any]) -> None:
        """Show how the run ended and its results."""


def in_sweep() -> bool:
    """Return whether an agent of a W&B sweep started this process and chose the run."""
    return bool(os.environ.get("WANDB_SWEEP_ID") and os.environ.get("WANDB_RUN_ID"))
