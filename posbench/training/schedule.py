"""What is due after which update: a row of the log, a validation, an evaluation, a
checkpoint.
"""

import dataclasses
import math
from collections.abc import Mapping

from posbench.config.schema import Config, EvaluationConfig
from posbench.evaluation.job import planned_evaluations

_VALIDATIONS = 4  # per run, unless the configuration says how often


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What is due after which update. Updates are counted from 1."""

    total: int
    log_every: int
    validate_every: int  # 0 = never
    save_every: int
    evaluations: Mapping[int, EvaluationConfig]  # by update; 0 = before the first

    def due(self, step: int) -> set[str]:
        """Return what is due after an update, of log, validate, evaluate and save."""
        names = set()
        if self._falls_on(step, self.log_every):
            names.add("log")
        if self._falls_on(step, self.validate_every):
            names.add("validate")
        if step in self.evaluations:
            names.add("evaluate")
        if self._falls_on(step, self.save_every):
            names.add("save")
        return names

    def _falls_on(self, step: int, every: int) -> bool:
        if every == 0:
            return False
        return step % every == 0 or step == self.total


def schedule_of(config: Config, can_validate: bool) -> Schedule:
    """Return the schedule of a run; `can_validate`: whether it has validation data."""
    runtime = config.runtime
    total = config.training.steps
    validate_every = runtime.validate_every_steps
    if validate_every is None:
        validate_every = math.ceil(total / _VALIDATIONS) if can_validate else 0
    return Schedule(
        total=total,
        log_every=runtime.log_every_steps,
        validate_every=validate_every,
        save_every=runtime.checkpoint_every_steps,
        evaluations=planned_evaluations(config),
    )
