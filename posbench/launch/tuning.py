"""tune=true: the learning rate of each encoding, chosen on validation text at the
training length and nothing else.
"""

import dataclasses
import logging
import math
from collections.abc import Mapping
from typing import Any

from posbench.config.overrides import read
from posbench.config.schema import Config
from posbench.errors import UserError
from posbench.launch.plans import Plan

logger = logging.getLogger(__name__)
_RATE = "training.learning_rate"
_MULTIPLES = "0.25,0.5,1,2,4"
# nonoverlap takes a quarter of these blocks as spans of text. Neighbouring rates differ
# by little, hence so many.
_EVALUATION: dict[str, Any] = {
    "protocols": ("nonoverlap",),
    "ratios": (1.0,),
    "split": "validation",
    "blocks": 4096,
    "longest": None,
    "at_tokens": (),
}


def grid(of_sweep: Mapping[str, str]) -> list[float]:
    """Return multiples of the learning rate to try, ascending; empty without
    `tune=true`.
    """
    tune = of_sweep.get("tune", "false")
    is_wrong = tune not in ("true", "false")
    if is_wrong or (tune == "false" and "tune_grid" in of_sweep):
        raise UserError(
            "expected tune=true, with or without tune_grid=0.5,1,2, or tune=false"
        )
    if tune == "false":
        return []
    typed = of_sweep.get("tune_grid", _MULTIPLES).strip("[]")
    multiples = read(f"[{typed}]")
    are_right = [type(x) in (int, float) and 0 < x < math.inf for x in multiples]
    if not multiples or not all(are_right):
        raise UserError(
            f"tune_grid is {multiples}: expected multiples of the learning rate, such"
            " as [0.5,1,2]"
        )
    return sorted(map(float, multiples))


def trials(todo: list[Plan], grid: list[float]) -> list[Plan]:
    """Return each encoding at each multiple of its learning rate, with seed 0, as runs
    in the folder `tuning`.
    """
    by_id: dict[str, Plan] = {}
    for plan in todo:
        config = plan.config
        evaluation = config.evaluation.as_trained(**_EVALUATION)
        if config.data.task:
            evaluation = dataclasses.replace(evaluation, protocols=("problems",))
        # a run of the sweep may have the same name
        tracking = dataclasses.replace(config.tracking, backend="none")
        config = dataclasses.replace(
            config, seed=0, evaluation=evaluation, tracking=tracking
        )
        for multiple in grid:
            rate = float(f"{config.training.learning_rate * multiple:.6g}")
            trial = _at_rate(config, rate)
            folder = plan.folder.parent / "tuning" / trial.id
            # a trial that two studies need is in the first one's folder
            by_id.setdefault(trial.id, Plan(trial, folder, ()))
    return list(by_id.values())


def at_best_rates(todo: list[Plan], grid: list[float]) -> list[Plan]:
    """Return the runs of a sweep at their best learning rates, once their trials have
    run. An encoding whose trials have all failed keeps its own rate.
    """
    from posbench.launch import pool  # it imports torch

    tried = {trial.id: trial for trial in trials(todo, grid)}
    tuned: dict[str, Plan] = {}  # by id: rates that were typed become one
    best_rates: dict[str, float] = {}  # by the id of an encoding's first trial
    for plan in todo:
        of_plan = trials([plan], grid)
        key = of_plan[0].id
        if key not in best_rates:
            losses = {}  # by rate
            shown = []
            rates = [trial.config.training.learning_rate for trial in of_plan]
            for rate, trial in zip(rates, of_plan, strict=True):
                loss = pool.loss_at_train_length(tried[trial.id])
                if loss is not None:
                    losses[rate] = loss
                shown.append(f"{rate:g}: {losses.get(rate, 'failed')}")
            own_rate = plan.config.training.learning_rate
            best = min(losses, key=losses.__getitem__, default=own_rate)
            advice = ""
            if losses and best in (min(rates), max(rates)):
                advice = (
                    ", at the edge of the grid: a wider tune_grid may find a better one"
                )
            logger.info(
                "%s: learning rate %g (nats/token: %s)%s",
                plan.config.encoding.name,
                best,
                ", ".join(shown),
                advice,
            )
            best_rates[key] = best

        rate = best_rates[key]
        config = _at_rate(plan.config, rate)
        words = [word for word in plan.command if not word.startswith(f"{_RATE}=")]
        command = (*words, f"{_RATE}={rate}")
        at_best = Plan(config, config.folder, command)
        tuned[at_best.id] = at_best
    return list(tuned.values())


def _at_rate(config: Config, rate: float) -> Config:
    training = dataclasses.replace(config.training, learning_rate=rate)
    return dataclasses.replace(config, training=training)
