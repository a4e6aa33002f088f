"""The mirror of a run at W&B or in TensorBoard: row n of `rows.jsonl` is step n there.

A session therefore first gets the rows that it lacks. Curves of different encodings
overlay, because training rows have `tokens` as their axis and evaluation rows
`eval/context`. Another tracker is another class with the methods of `Session`.
"""

import os
from collections.abc import Mapping
from typing import Any, Protocol

import pandas as pd

CONTEXT = "eval/context"  # tokens: the axis of evaluation rows


class Session(Protocol):
    """A place where rows are shown; the run folder stays the record."""

    url: str  # where a reader finds it
    starting_step: int  # it has the rows before this one

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Show a row. All rows of the run come, in order, also those it has."""

    def finish(self, status: str, facts: Mapping[str, Any], rows: pd.DataFrame) -> None:
        """Show how the run ended and its results; `rows`: what `results.read` has."""


def in_sweep() -> bool:
    """Return whether an agent of a W&B sweep started this process and chose the run."""
    return bool(os.environ.get("WANDB_SWEEP_ID") and os.environ.get("WANDB_RUN_ID"))
