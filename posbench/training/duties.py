"""What is done after an update: rows of the log, a validation, an evaluation, a
checkpoint. `Schedule` says when.
"""

import dataclasses
import logging
from collections.abc import Callable

from posbench.config.schema import Config, EvaluationConfig
from posbench.data.batches import Batch
from posbench.data.tokens import TaskData, Tokens
from posbench.errors import RowsFailed
from posbench.run.folder import Run
from posbench.training.resume import save
from posbench.training.schedule import Schedule, schedule_of
from posbench.training.step import Clock, Trainer
from posbench.training.validation import validation_losses, validation_of

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Duties:
    """What a training run does beside its updates."""

    trainer: Trainer
    run: Run | None  # None: another process writes the run folder
    clock: Clock
    schedule: Schedule
    validation: list[Batch]
    is_task: bool
    evaluate: Callable[[int, EvaluationConfig], object]

    @classmethod
    def of(
        cls,
        config: Config,
        trainer: Trainer,
        run: Run | None,
        clock: Clock,
        tokens: Tokens | TaskData,
        evaluate: Callable[[int, EvaluationConfig], object],
    ) -> "Duties":
        """Return a run's duties. A continued run keeps the cadence of its first
        attempt.
        """
        begun = config
        if run:
            begun = run.record_as_begun(config)
        begun = trainer.world.from_first(begun)
        validation = validation_of(tokens, begun)
        schedule = schedule_of(begun, can_validate=bool(validation))
        is_task = isinstance(tokens, TaskData)
        return cls(trainer, run, clock, schedule, validation, is_task, evaluate)

    def after(
        self, step: int, due: set[str], loss: float, norm: float, rate: float
    ) -> None:
        """Log, validate and evaluate as far as these are due after an update."""
        if "log" in due:
            numbers = {
                "train/loss": loss,
                "train/grad_norm": norm,
                "train/learning_rate": rate,
                **self.clock.speed(step),
            }
            in_seven_digits = {
                name: float(f"{number:.7g}") for name, number in numbers.items()
            }
            self._log(step, in_seven_digits)
        if "validate" in due:
            self._log(
                step, validation_losses(self.trainer, self.validation, self.is_task)
            )
        # before a checkpoint, from which a resumed run would not come back here
        if "evaluate" in due:
            self.evaluate_on_the_way(step)

    def evaluate_on_the_way(self, step: int) -> None:
        """Evaluate the weights of this moment. The clock stands still."""
        n_tokens = step * self.trainer.training.tokens_per_step
        logger.info("after %s tokens of training:", f"{n_tokens:,}")
        with self.clock.paused():
            try:
                self.evaluate(step, self.schedule.evaluations[step])
            except RowsFailed as error:
                logger.warning("%s", error)

    def save(self, step: int) -> None:
        """Write a checkpoint, in the process that has the run folder."""
        if self.run:
            save(self.run, self.trainer, step, self.clock)

    def _log(self, step: int, values: dict[str, float]) -> None:
        if self.run:
            n_tokens = step * self.trainer.training.tokens_per_step
            self.run.log({"step": step, "tokens": n_tokens, **values})
