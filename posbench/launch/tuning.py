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
from posbench.config.overrides import parted
from posbench.config.schema import Config
from posbench.launch import plans, states
from posbench.launch.plans import Plan
from posbench.launch.states import Status
from posbench.run_folder.jsonl import listed

logger = logging.getLogger(__name__)

FOLDER = "tuning"  # below the study's
RECORD = "tuning.json"
_KEY = "training.learning_rate"
_BLOCKS = 4096  # of which nonoverlap takes a quarter as windows: neighbouring rates differ by little


def tuned(todo: list[Plan], grid: list[float], run: Callable[[list[Plan]], dict[str, Status]]) -> list[Plan]:
    """The jobs of a sweep at their best learning rates, after training what the choice needs.

    Writes `tuning.json` into each study: per encoding the rates tried with their nll, the choice and the spread.

    Args:
        grid: multiples of each encoding's configured learning rate.
        run: runs jobs and returns what became of them.
    """
    groups = _groups(todo)
    status = run(trials(todo, grid))
    rows = {group: _row(job, trials([job], grid), status) for group, job in groups.items()}
    for row in rows.values():
        _tell(row)
    for study, own in plans.by_study(todo).items():
        _write(study, [rows[group] for group in dict.fromkeys(map(group, own))])
    return [at_rate(job, rows[group(job)]["chosen"]) for job in todo]


def at_rate(job: Plan, rate: float) -> Plan:
    """A job at a learning rate, as the single run `posbench train ... training.learning_rate=...` would be."""
    overrides = [override for override in job.overrides if parted(override)[0] != _KEY]
    return job.at(_with_rate(job.config, rate), [*overrides, f"{_KEY}={rate!r}"], job.folder.parent)


def _with_rate(config: Config, rate: float) -> Config:
    return dataclasses.replace(config, training=dataclasses.replace(config.training, learning_rate=rate))


def trials(todo: list[Plan], grid: list[float]) -> list[Plan]:
    """The runs that the choice needs: each encoding at each multiple of its learning rate."""
    return [_trial(job, factor) for job in _groups(todo).values() for factor in grid]


def _groups(todo: list[Plan]) -> dict[str, Plan]:
    groups: dict[str, Plan] = {}
    for job in todo:
        groups.setdefault(group(job), job)
    return groups


def group(job: Plan) -> str:
    """The key of jobs that are tuned together: they differ in the seed only."""
    start = job.config.start and dataclasses.replace(job.config.start, weights_sha256="", seed=0)
    return run_id(dataclasses.replace(job.config, seed=0, start=start))


def _trial(job: Plan, factor: float) -> Plan:
    """A run that is evaluated on validation text at the training length only."""
    config = job.config
    rate = float(f"{config.training.learning_rate * factor:.6g}")
    evaluation = dataclasses.replace(
        config.evaluation,
        protocols=("nonoverlap",),
        ratios=(1.0,),
        longest=None,
        windowed=False,
        sinks=0,
        extensions=(),
        tasks=(),
        split="validation",
        blocks=_BLOCKS,
        at_tokens=(),
    )
    # Not mirrored to W&B: at the chosen rate it has the name of the sweep's own run.
    tracking = dataclasses.replace(config.tracking, backend="none")
    config = dataclasses.replace(_with_rate(config, rate), seed=0, evaluation=evaluation, tracking=tracking)
    return job.at(config, (), job.folder.parent / FOLDER)


def _row(job: Plan, trials: list[Plan], status: dict[str, Status]) -> dict[str, Any]:
    tried: list[dict[str, Any]] = [
        {
            "id": trial.id,
            "learning_rate": trial.config.training.learning_rate,
            "status": status[trial.id].name,
            "reason": status[trial.id].reason,
            "nll": states.nll_in_distribution(trial) if status[trial.id].name == "done" else None,
        }
        for trial in trials
    ]
    measured = {one["learning_rate"]: one["nll"] for one in tried if one["nll"] is not None}
    best = min(measured, key=measured.__getitem__, default=None)
    rates = [one["learning_rate"] for one in tried]
    return {
        "encoding": job.config.encoding.name,
        "options": job.config.encoding.options,
        "configured": job.config.training.learning_rate,
        "chosen": best or job.config.training.learning_rate,
        "at_edge": len(tried) > 1 and best in (min(rates), max(rates)),
        "spread": max(measured.values()) - min(measured.values()) if measured else None,  # nats per token
        "tried": tried,
    }


def _write(study: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows into a study's `tuning.json`, in the place of those of the same encodings with the same options."""
    own = [(row["encoding"], row["options"]) for row in rows]
    earlier = [row for row in listed(study / RECORD, "schemes") if (row.get("encoding"), row.get("options")) not in own]
    study.mkdir(parents=True, exist_ok=True)
    content = {
        "schema": 1,
        "chosen_by": "nll per token on validation text at the training length (nonoverlap), seed 0",
        "schemes": [*earlier, *rows],
    }
    files.write(study / RECORD, json.dumps(content, indent=2).encode() + b"\n")


def _tell(row: dict[str, Any]) -> None:
    name, chosen = row["encoding"], row["chosen"]
    if row["spread"] is None:
        logger.warning("%s: no learning rate of the grid could be trained; it keeps %g", name, chosen)
        return
    edge = ", at the edge of the grid: a wider tune_grid may find a better one" if row["at_edge"] else ""
    logger.info("%s: learning rate %g (spread over the grid %.4f nats/token)%s", name, chosen, row["spread"], edge)
