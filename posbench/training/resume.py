"""Where training goes on from: the newest checkpoint, the weights of another run, or
nothing.
"""

import logging
from typing import Any

from posbench import machine
from posbench.config.schema import Config
from posbench.run import checkpoint
from posbench.run.folder import Run
from posbench.run.model import start_weights
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
    """Load the state that training goes on from, and cut the rows back to its step;
    return the number of updates so far and the saved state.
    """
    step = 0
    weights, optimizer = None, None
    state: dict[str, Any] = {}
    if run:
        trained = checkpoint.at(run.folder, config.training.steps)
        newest = None if trained else checkpoint.newest(run.folder)
        if trained:  # no update follows: neither optimizer nor clock is needed
            step, weights = trained.step, trained.weights()
        elif newest:
            step, weights = newest.step, newest.weights()
            optimizer, state = newest.optimizer(), newest.state()
            run.cut(step)
            logger.info("continuing from step %d", step)
        else:
            run.cut(0)
            if config.start:
                weights = start_weights(config.start)
    found = trainer.world.from_first((step, weights, optimizer, state))
    step, weights, optimizer, state = found
    if weights is not None:
        trainer.model.load_state_dict(weights)
    if optimizer is not None:
        trainer.optimizer.load_state_dict(optimizer)
    return step, state
