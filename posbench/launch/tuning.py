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
from posbench.launch.states import Status

logger = logging.getLogger(__name__)
FOLDER = "tuning"  # below the study's
# Of these blocks nonoverlap takes a quarter as windows: neighbouring rates differ by little.
_EVALUATION: dict[str, Any] = {"protocols": ("nonoverlap",), "ratios": (1.0,), "split": "validation", "blocks": 4096}
_EVALUATION |= {"longest": None, "windowed": False, "sinks": 0, "extensions": (), "tasks": (), "at_tokens": ()}


def tuned(todo: list[Plan], grid: list[float], run: Callable[[list[Plan]], dict[str, Status]]) -> list[Plan]:
    """The runs of a sweep at their best learning rates, after training what the choice needs.

    Args:
        grid: multiples of each encoding's configured learning rate.
        run: runs plans and returns what became of them.
    """
    status = run(trials(todo, grid))
    rates = {key: _best(plan, trials([plan], grid), status) for key, plan in _groups(todo).items()}
    return [_at_rate(plan, rates[_group(plan)]) for plan in todo]


def trials(todo: list[Plan], grid: list[float]) -> list[Plan]:
    """The runs that the choice needs: each encoding at each multiple of its learning rate, on validation text only."""
    return [_trial(plan, factor) for plan in _groups(todo).values() for factor in grid]


def _groups(todo: list[Plan]) -> dict[str, Plan]:
    return {_group(plan): plan for plan in reversed(todo)}  # of each group the first


def _group(plan: Plan) -> str:
    """The key of runs that are tuned together: they differ in the seed only."""
    start = plan.config.start and dataclasses.replace(plan.config.start, weights_sha256="", seed=0)
    return dataclasses.replace(plan.config, seed=0, start=start).id


def _at_rate(plan: Plan, rate: float) -> Plan:
    """A run at a learning rate, as the single run `posbench train ... training.learning_rate=...` would be."""
    training = dataclasses.replace(plan.config.training, learning_rate=rate)
    return plan.changed(dataclasses.replace(plan.config, training=training), f"training.learning_rate={rate!r}")


def _trial(plan: Plan, factor: float) -> Plan:
    config = _at_rate(plan, float(f"{plan.config.training.learning_rate * factor:.6g}")).config
    evaluation = dataclasses.replace(config.evaluation, **_EVALUATION)
    # Not mirrored to W&B: at the chosen rate it has the name of the sweep's own run.
    tracking = dataclasses.replace(config.tracking, backend="none")
    config = dataclasses.replace(config, seed=0, evaluation=evaluation, tracking=tracking)
    return Plan(config, plan.folder.parent / FOLDER / config.id, ())


def _best(plan: Plan, trials: list[Plan], status: dict[str, Status]) -> float:
    """The learning rate of the lowest loss, which is logged with all that were tried; the plan's own if none was."""
    done = [trial for trial in trials if status[trial.id].name == "done"]
    losses = {trial.config.training.learning_rate: states.loss_at_train_length(trial) for trial in done}
    measured = {rate: loss for rate, loss in losses.items() if loss is not None}
    name, rates = plan.config.encoding.name, [trial.config.training.learning_rate for trial in trials]
    if not measured:
        logger.warning("%s: no learning rate of the grid could be trained; it keeps its own", name)
        return plan.config.training.learning_rate
    best = min(measured, key=lambda rate: measured[rate])
    tried = ", ".join(f"{rate:g}: {measured[rate]:.4f}" if rate in measured else f"{rate:g}: failed" for rate in rates)
    edge = len(rates) > 1 and best in (rates[0], rates[-1])
    advice = ", at the edge of the grid: a wider tune_grid may find a better one" if edge else ""
    logger.info("%s: learning rate %g (nats/token by rate: %s)%s", name, best, tried, advice)
    return best
