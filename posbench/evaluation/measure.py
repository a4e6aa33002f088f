"""What a run is measured by: nll of a text (`levels.Levels`), or right answers of a task (`answers.Answers`)."""

import abc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from posbench.config.external import AnyConfig
from posbench.run_folder.rows import EvaluationRow

Learned = Literal["yes", "no", "not resolved"]
Headline = dict[str, float | str | None]  # by name; only `learned` is a text


class Measure(abc.ABC):
    """The results of a run, of its newest checkpoint."""

    protocol: ClassVar[str]  # of the rows that have them
    main: ClassVar[tuple[str, ...]]  # names in the headline that say most
    columns: ClassVar[tuple[str, ...]]  # of rows: those that come first in a table

    at: Mapping[Any, Any]  # what was measured, by where

    @classmethod
    @abc.abstractmethod
    def of(cls, folder: Path, config: AnyConfig, rows: Sequence[EvaluationRow]) -> Self:
        """Those of a run folder, on the split that its configuration names, else another that was evaluated.

        Args:
            rows: those to go by, of all that the folder has.

        Raises:
            UserError: its files cannot be read as what they should be.
        """

    @property
    @abc.abstractmethod
    def learned(self) -> Learned | None:
        """Whether the run has learned; None where that is not known."""

    @property
    @abc.abstractmethod
    def headline(self) -> Headline:
        """The run in a few values by name."""

    @staticmethod
    @abc.abstractmethod
    def order(row: EvaluationRow) -> tuple[Any, ...]:
        """The place of a row in a table: as trained first."""
