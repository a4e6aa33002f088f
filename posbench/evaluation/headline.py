"""A run in a few numbers: of text `levels.Levels` has them, of a task `answers.Answers`."""

from pathlib import Path

from posbench.config.external import AnyConfig
from posbench.evaluation.answers import Answers
from posbench.evaluation.levels import Levels
from posbench.evaluation.measure import Headline, Measure
from posbench.run_folder.folder import load_any_config
from posbench.run_folder.rows import evaluation_rows


def measure_of(config: AnyConfig) -> type[Measure]:
    """What a run of this configuration is measured by."""
    return Levels if config.data.task is None else Answers


def headline_of(folder: Path) -> Headline:
    """The headline of a run folder.

    Raises:
        UserError: its files cannot be read as what they should be.
    """
    config = load_any_config(folder)
    return measure_of(config).of(folder, config, evaluation_rows(folder)).headline
