"""`tune=true`: the learning rate of each encoding, chosen on validation text at the training length and nothing else.

Each encoding is trained with seed 0 and the same budget at a few multiples of its configured learning rate, as runs in
the study's folder `tuning`. What it does beyond its training length, and the test text, play no part in the choice.
"""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from posbench.launch import states
from posbench.launch.plans import Plan

logger = logging.getLogger(__name__)
_RATE = "training.learning_rate"
# Of these blocks nonoverlap takes a quarter as windows: neighbouring rates differ by little.
_EVALUATION: dict[str, Any] = {"protocols": ("nonoverlap",), "ratios": (1.0,), "split": "validation", "blocks": 4096}
_EVALUATION |= {"longest": None, "windowed": False, "sinks": 0, "extensions": (), "tasks": (), "at_tokens": ()}


def tuned(todo: list[Plan], grid: list[float], run: Callable[[list[Plan]], object]) -> list[Plan]:
    """The runs of a sweep at their best learning rates, after running the trials that the choice needs."""
    run(trials(todo, grid))
    best: dict[str, float] = {}
    for plan in todo:
        tried = trials([plan], grid)
        if tried[0].id in best:
            continue
        losses = {trial.config.training.learning_rate: states.loss_at_train_length(trial) for trial in tried}
        measured = {rate: loss for rate, loss in losses.items() if loss is not None}
        rate = min(measured, key=lambda rate: measured[rate], default=plan.config.training.learning_rate)
        shown = ", ".join(f"{rate:g}: {measured.get(rate, 'failed')}" for rate in losses)
        edge = len(grid) > 1 and rate in (min(losses), max(losses))
        advice = ", at the edge of the grid: a wider tune_grid may find a better one" if edge else ""
        logger.info("%s: learning rate %g (nats/token: %s)%s", plan.config.encoding.name, rate, shown, advice)
        best[tried[0].id] = rate
    return [plan.changed(_RATE, best[trials([plan], grid)[0].id]) for plan in todo]


def trials(todo: list[Plan], grid: list[float]) -> list[Plan]:
    """Each encoding at each multiple of its learning rate, with seed 0, on validation text only."""
    every = (_trial(plan, factor) for plan in todo for factor in grid)
    return list({trial.id: trial for trial in every}.values())


def _trial(plan: Plan, factor: float) -> Plan:
    config = plan.changed(_RATE, float(f"{plan.config.training.learning_rate * factor:.6g}")).config
    evaluation = dataclasses.replace(config.evaluation, **_EVALUATION)
    tracking = dataclasses.replace(config.tracking, backend="none")  # at the best rate it has the name of a sweep's run
    config = dataclasses.replace(config, seed=0, evaluation=evaluation, tracking=tracking)
    return Plan(config, plan.folder.parent / "tuning" / config.id, ())
