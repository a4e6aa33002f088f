"""A run in a few numbers: of text `levels.Levels` has them, of a task `answers.Answers`."""

from pathlib import Path

from posbench.config.external import AnyConfig
from posbench.config.schema import Config
from posbench.errors import UserError, did_you_mean
from posbench.evaluation.answers import Answers
from posbench.evaluation.levels import Levels, may_claim
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


def objective(folder: Path, name: str | None) -> float | None:
    """The value that a sweeper gets: the headline value of that name, by default nll at the training length.

    The reach of a run that has not learned is 0: it must not win, and a sweeper needs a number.
    """
    found = headline_of(folder)
    value = found.get(name or "nll_1x")
    if name == "reach" and not may_claim(found["learned"]):
        return 0.0
    return None if isinstance(value, str) else value


def check_objective(config: Config) -> None:
    """Refuse an objective that the configured evaluation does not give.

    Raises:
        UserError: it is none of the headline's values at the configured ratios.
    """
    name, measure = config.runtime.objective, measure_of(config)
    known = measure.objectives(config)
    if name is not None and name not in known:
        raise UserError(f"objective is '{name}'{did_you_mean(name, known)} (choices: {', '.join(known)})")
    if name is not None and measure.protocol not in config.evaluation.protocols:
        raise UserError(f"objective is '{name}', of {measure.protocol}: it is not among evaluation.protocols")
