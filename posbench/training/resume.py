"""Where training goes on from: the newest checkpoint, the weights of another run, or
nothing.
"""

import logging
from typing import Any

from posbench import machine
from posbench.config.schema import Config
from posbench.run import checkpoint
from posbench.run.model import weights_of
from posbench.run.run import Run
from posbench.training.step import Clock, Trainer

logger = logging.getLogger(__name__)


def save(run: Run, trainer: Trainer, step: int, clock: Clock) -> None:
    """Write a checkpoint, after the rows up to it. Raises RunFailed if there is no
    room.
    """
    run.sync()
    totals = {"tokens": step * trainer.training.tokens_per_step, **clock.totals()}
    # before the checkpoint: after the last one nothing is recorded
    run.update(**totals)
    state = totals | {"dtype": machine.dtype_name(trainer.dtype)}
    weights, optimizer = trainer.model.state_dict(), trainer.optimizer.state_dict()
    checkpoint.save(run.folder, step, weights, optimizer, state)


def resume(
    trainer: Trainer, config: Config, run: Run | None
) -> tuple[int, dict[str, Any]]:
    """Load the state that training goes on from; return the number of updates so far
    and the saved state.
    """
    newest = _newest_state(config, run) if run else None
    step, weights, optimizer, state = trainer.world.from_first(newest)
    if weights is not None:
        trainer.model.load_state_dict(weights)
    if optimizer is not None:
        trainer.optimizer.load_state_dict(optimizer)
    return step, state


def _newest_state(config: Config, run: Run) -> tuple[int, Any, Any, dict[str, Any]]:
    """Return the step, weights, optimizer and state of the newest checkpoint, and cut
    the rows back to its step.
    """
    trained = checkpoint.at(run.folder, config.training.steps)
    if trained:  # no update follows, so that neither optimizer nor clock is needed
        return trained.step, trained.weights(), None, {}
    newest = checkpoint.newest(run.folder)
    if newest:
        run.cut(newest.step)
        logger.info("continuing from step %d", newest.step)
        return newest.step, newest.weights(), newest.optimizer(), newest.state()
    run.cut(0)
    if config.start:
        return 0, weights_of(config.start), None, {}
    return 0, None, None, {}
