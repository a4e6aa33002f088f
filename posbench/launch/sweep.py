"""A comparison of many runs. It can be resumed, survives runs that fail, and ends with
the report.

A run is its configuration, so a sweep is a list of plans. Run again, a sweep does what
is missing or failed; the run folders are the only memory it needs.
"""

import dataclasses
import itertools
import logging
import math
import os
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from posbench import machine, reports
from posbench.config.overrides import OF_A_SWEEP, read, split
from posbench.data.tokens import prepare_all
from posbench.errors import PosbenchError, UserError
from posbench.launch import plans, pool, slurm
from posbench.launch.plans import Plan
from posbench.launch.pool import Status
from posbench.launch.run import run
from posbench.results.compare import ENOUGH_SEEDS, REFERENCE
from posbench.run import checkpoint
from posbench.run.run import other_code
from posbench.terminal import console, exits

logger = logging.getLogger(__name__)
# tokens: with fewer most of sweep=six do not beat the n-gram model (docs/results.md)
LEARNING_TAKES = 2_000_000


def sweep(
    arguments: list[str],
    n_jobs: int | None = None,
    config_dir: Path | None = None,
    dry_run: bool = False,
    slurm_options: str | None = None,
) -> list[Plan]:
    """Run every combination of the arguments, then write the report; return the plans.

    A dry run only prints the commands, and how many runs and tokens those are. With
    `slurm_options`, missing runs are submitted as one array instead. Raises
    PosbenchError if some runs failed; all others are done.
    """
    of_sweep = {key: text for key, text in map(split, arguments) if key in OF_A_SWEEP}
    overrides = [word for word in arguments if split(word)[0] not in of_sweep]
    grid = _grid(of_sweep)
    if "sweep" not in of_sweep and not overrides:
        raise UserError(
            "nothing to compare: give a list, such as encoding=rope,alibi, or"
            " sweep=NAME"
        )
    if slurm_options is not None and (n_jobs or grid):
        raise UserError(
            "--slurm submits what is missing and ends: leave out --n-jobs and tune=true"
        )
    todo = plans.resolve(
        plans.read_sets(of_sweep.get("sweep"), overrides, config_dir), config_dir
    )
    console.log_to_terminal()
    missing = [plan for plan in todo if not pool.is_finished(plan)]
    code_changes = [
        line for plan in todo for line in other_code(plan.config, pool.record(plan))
    ]
    for line in dict.fromkeys(
        [*code_changes, *(verdict_warnings(todo) if missing else [])]
    ):
        logger.warning("%s", line)
    if dry_run:
        print(cost([*rate_trials(todo, grid), *todo]))
        return todo
    prepare_all([plan.config for plan in missing])
    todo = with_tuned_rates(todo, grid, n_jobs) if grid else todo
    reports.sweeps.record([plan.folder for plan in todo], arguments, config_dir)
    if slurm_options is not None and missing:
        slurm.submit(missing, shlex.split(slurm_options))
        return todo
    status = execute(todo, n_jobs)
    if any(pool.is_trained(plan) for plan in todo):
        reports.main(
            [plan.folder for plan in todo if (plan.folder / "run.json").is_file()]
        )
    if failed := [plan for plan in todo if status[plan.id] != pool.DONE]:
        for plan in failed:
            logger.error("not done: %s", pool.status_line(plan, status[plan.id], todo))
        count = exits.plural(len(failed), "run")
        names = ", ".join(plan.id for plan in failed)
        raise PosbenchError(f"{count} of {len(todo)} not done: {names}")
    return todo


def cost(todo: list[Plan]) -> str:
    """Return the commands of plans that are not finished, one per line, then how many
    runs and tokens those are.
    """
    unfinished = [plan for plan in todo if not pool.is_finished(plan)]
    training = [
        plan.config
        for plan in unfinished
        if not (pool.is_trained(plan) and checkpoint.every(plan.folder))
    ]
    tokens = sum(
        config.training.steps * config.training.tokens_per_step for config in training
    )
    # a trial of a learning rate has none
    commands = [shlex.join(plan.command) for plan in unfinished if plan.command]
    counts = (
        f"{exits.plural(len(todo), 'run')}: {len(todo) - len(unfinished)} finished,"
        f" {len(unfinished)} to do"
    )
    return "\n".join(
        [
            *commands,
            f"{counts}, {tokens:,} tokens to train on.",
            "Nothing was run or written.",
        ]
    )


def verdict_warnings(todo: list[Plan]) -> list[str]:
    """Return why the report of these runs will lack verdicts, and what to type instead;
    empty for one scheme.
    """
    configs = [plan.config for plan in todo]
    if len({repr(config.encoding) for config in configs}) < 2:
        return []

    lines = []
    seeds = Counter[str]()
    for config in configs:
        seeds[repr(dataclasses.replace(config, seed=0, start=None))] += 1
    fewest = min(seeds.values())
    if fewest < ENOUGH_SEEDS:
        lines.append(
            f"Verdicts need {ENOUGH_SEEDS} seeds, here {fewest}: type seed=0,1,2,3,4."
        )

    on_text = [config for config in configs if config.data.task is None]
    if on_text and REFERENCE not in {config.encoding.name for config in configs}:
        lines.append(
            f"Schemes are compared with {REFERENCE}, which is not among these: add it."
        )

    tokens = [config.training.tokens for config in on_text if config.start is None]
    if tokens and min(tokens) < LEARNING_TAKES:
        lines.append(
            f"After {min(tokens):,} tokens most schemes do not beat an n-gram model:"
            " experiment=reader trains for longer."
        )
    return lines


def execute(todo: list[Plan], n_jobs: int | None) -> dict[str, Status]:
    """Run plans, each in its own process, and return the status of each by run id.

    As many run at a time as there are cores or GPUs, and a run sees only its GPU; a run
    of several processes takes one for each of them. If more run at a time than there
    are GPUs, they share these evenly.
    """
    runtime = todo[0].config.runtime
    size, gpus = runtime.processes or 1, [dict[str, str]()]
    on_cpu = machine.resolve(runtime.device).type == "cpu"
    if not on_cpu and runtime.device in ("auto", "cuda"):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = (
            visible.split(",")
            if visible
            else [str(number) for number in range(torch.cuda.device_count())]
        )
        groups = [
            names[start : start + size]
            for start in range(0, len(names) - size + 1, size)
        ]
        gpus = [{"CUDA_VISIBLE_DEVICES": ",".join(group)} for group in groups] or gpus
    fit = (
        max(1, machine.cores() // (runtime.threads or 1) // size)
        if on_cpu
        else len(gpus)
    )
    n_slots = n_jobs or min(len(todo), fit)
    threads = {
        "OMP_NUM_THREADS": str(runtime.threads or machine.threads_each(n_slots * size))
    }
    slots = [gpus[number % len(gpus)] | threads for number in range(n_slots)]
    return pool.run(todo, slots, run)


# -- tune=true: the learning rate of each encoding, chosen on validation text at the
# training length and nothing else --

_RATE = "training.learning_rate"
# nonoverlap takes a quarter of these blocks as spans of text. Neighbouring rates differ
# by little, hence so many.
_EVALUATION: dict[str, Any] = {
    "protocols": ("nonoverlap",),
    "ratios": (1.0,),
    "split": "validation",
    "blocks": 4096,
    "longest": None,
    "windowed": False,
    "sinks": 0,
    "extensions": (),
    "tasks": (),
    "at_tokens": (),
}


def _grid(of_sweep: dict[str, str]) -> list[float]:
    """Return multiples of the learning rate to try, ascending; empty without
    `tune=true`.
    """
    tune = of_sweep.get("tune", "false")
    if tune not in ("true", "false") or (tune == "false" and "tune_grid" in of_sweep):
        raise UserError(
            "expected tune=true, with or without tune_grid=0.5,1,2, or tune=false"
        )
    grid = read(f"[{of_sweep.get('tune_grid', '0.25,0.5,1,2,4').strip('[]')}]")
    if not grid or not all(
        type(factor) in (int, float) and 0 < factor < math.inf for factor in grid
    ):
        raise UserError(
            f"tune_grid is {grid}: expected multiples of the learning rate, such as"
            " [0.5,1,2]"
        )
    return sorted(map(float, grid)) if tune == "true" else []


def rate_trials(todo: list[Plan], grid: list[float]) -> list[Plan]:
    """Return each encoding at each multiple of its learning rate, with seed 0, as runs
    in the folder `tuning`.
    """
    trials: dict[str, Plan] = {}
    for plan, factor in itertools.product(todo, grid):
        config = plan.changed(
            _RATE, float(f"{plan.config.training.learning_rate * factor:.6g}")
        ).config
        protocols = {"protocols": ("problems",)} if config.data.task else {}
        evaluation = dataclasses.replace(config.evaluation, **_EVALUATION | protocols)
        # a run of the sweep may have the same name
        tracking = dataclasses.replace(config.tracking, backend="none")
        config = dataclasses.replace(
            config, seed=0, evaluation=evaluation, tracking=tracking
        )
        trials[config.id] = Plan(config, plan.folder.parent / "tuning" / config.id, ())
    return list(trials.values())


def with_tuned_rates(
    todo: list[Plan], grid: list[float], n_jobs: int | None
) -> list[Plan]:
    """Return the runs of a sweep at their best learning rates, after running the trials
    that the choice needs.
    """
    execute(rate_trials(todo, grid), n_jobs)
    best_rates: dict[str, float] = {}  # by the id of an encoding's first trial
    for plan in todo:
        trials = rate_trials([plan], grid)
        if trials[0].id in best_rates:
            continue
        losses = {
            trial.config.training.learning_rate: pool.loss_at_train_length(trial)
            for trial in trials
        }
        measured = {rate: loss for rate, loss in losses.items() if loss is not None}
        rate = min(
            measured,
            key=lambda rate: measured[rate],
            default=plan.config.training.learning_rate,
        )
        summary = ", ".join(
            f"{rate:g}: {measured.get(rate, 'failed')}" for rate in losses
        )
        edge = rate in (min(losses), max(losses))
        advice = (
            ", at the edge of the grid: a wider tune_grid may find a better one"
            if edge
            else ""
        )
        logger.info(
            "%s: learning rate %g (nats/token: %s)%s",
            plan.config.encoding.name,
            rate,
            summary,
            advice,
        )
        best_rates[trials[0].id] = rate
    return [
        plan.changed(_RATE, best_rates[rate_trials([plan], grid)[0].id])
        for plan in todo
    ]
