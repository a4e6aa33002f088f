"""`tune=true`: the learning rate of each encoding, chosen on validation text at the training length and nothing else.

Each encoding is trained with seed 0 and the same budget at a few multiples of its configured learning rate. What
it does beyond its training length, and the test text, play no part in the choice.
"""

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posbench import files
from posbench.config.identity import run_id
from posbench.config.schema import Config
from posbench.sweep import jobs
from posbench.sweep.jobs import Job, Status

logger = logging.getLogger(__name__)

FOLDER = "tuning"  # below the study's
RECORD = "tuning.json"


def tuned(todo: list[Job], grid: list[float], run: Callable[[list[Job]], dict[str, Status]]) -> list[Job]:
    """The jobs of a sweep at the learning rates that were best, having trained what the choice needs.

    Writes `tuning.json` into each study: per encoding the rates tried with their nll, the choice and the spread.

    Args:
        grid: multiples of each encoding's configured learning rate.
        run: runs jobs and returns what became of them.
    """
    groups: dict[str, Job] = {}
    for job in todo:
        groups.setdefault(_group(job), job)
    trials = {group: [_trial(job, factor) for factor in grid] for group, job in groups.items()}
    status = run([trial for several in trials.values() for trial in several])
    rows = {group: _row(groups[group], several, status) for group, several in trials.items()}
    for study in dict.fromkeys(job.folder.parent for job in todo):
        own = dict.fromkeys(_group(job) for job in todo if job.folder.parent == study)
        _write(study, grid, [rows[group] for group in own])
    for row in rows.values():
        _tell(row)
    return [_at_rate(job, rows[_group(job)]["chosen"]) for job in todo]


def _group(job: Job) -> str:
    """What is tuned together: jobs that differ in nothing but the seed."""
    return run_id(dataclasses.replace(job.config, seed=0))


def _trial(job: Job, factor: float) -> Job:
    """A run that is evaluated on validation text at the training length only."""
    config = job.config
    rate = float(f"{config.training.learning_rate * factor:.6g}")
    evaluation = dataclasses.replace(
        config.evaluation, protocols=("nonoverlap",), ratios=(1.0,), windowed=False, split="validation"
    )
    # Not mirrored to W&B: at the chosen rate it has the name of the sweep's own run.
    tracking = dataclasses.replace(config.tracking, backend="none")
    config = dataclasses.replace(_with_rate(config, rate), seed=0, evaluation=evaluation, tracking=tracking)
    return jobs.job_of((), config, job.folder.parent / FOLDER)


def _with_rate(config: Config, rate: float) -> Config:
    return dataclasses.replace(config, training=dataclasses.replace(config.training, learning_rate=rate))


def _at_rate(job: Job, rate: float) -> Job:
    kept = [override for override in job.overrides if not override.startswith("training.learning_rate=")]
    overrides = [*kept, f"training.learning_rate={rate!r}"]
    return jobs.job_of(overrides, _with_rate(job.config, rate), job.folder.parent)


def _row(job: Job, trials: list[Job], status: dict[str, Status]) -> dict[str, Any]:
    tried: list[dict[str, Any]] = [
        {
            "id": trial.id,
            "learning_rate": trial.config.training.learning_rate,
            "status": status[trial.id].name,
            "reason": status[trial.id].reason,
            "nll": jobs.nll_in_distribution(trial) if status[trial.id].name == "done" else None,
        }
        for trial in trials
    ]
    measured = [one for one in tried if one["nll"] is not None]
    best = min(measured, key=lambda one: one["nll"]) if measured else None
    rates = [one["learning_rate"] for one in tried]
    return {
        "encoding": job.config.encoding.name,
        "options": job.config.encoding.options,
        "configured": job.config.training.learning_rate,
        "chosen": best["learning_rate"] if best else job.config.training.learning_rate,
        "at_edge": best is not None and len(rates) > 1 and best["learning_rate"] in (min(rates), max(rates)),
        "spread": max(one["nll"] for one in measured) - best["nll"] if best else None,  # nats per token
        "tried": tried,
    }


def _write(study: Path, grid: list[float], rows: list[dict[str, Any]]) -> None:
    content = {
        "schema": 1,
        "chosen_by": "nll per token on validation text at the training length (nonoverlap), seed 0",
        "grid": grid,
        "schemes": rows,
    }
    study.mkdir(parents=True, exist_ok=True)
    files.write(study / RECORD, json.dumps(content, indent=2).encode() + b"\n")


def _tell(row: dict[str, Any]) -> None:
    name, chosen = row["encoding"], row["chosen"]
    if row["spread"] is None:
        logger.warning("%s: no learning rate of the grid could be trained; it keeps %g", name, chosen)
        return
    logger.info("%s: learning rate %g (spread over the grid %.4f nats/token)", name, chosen, row["spread"])
    if row["at_edge"]:
        logger.warning("%s: %g is at the edge of the grid; a wider tune_grid may find a better one", name, chosen)
