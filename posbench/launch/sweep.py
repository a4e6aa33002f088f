"""A comparison: many runs, resumable, which survives those that fail and ends with the report.

A run is its configuration, so a sweep is a list of plans. Run again, it does what is missing or failed; the run folders
are the only memory it needs.
"""

import dataclasses
import logging
import math
import os
import shlex
from collections import Counter
from pathlib import Path

import torch

from posbench import machine
from posbench.config.overrides import OF_A_SWEEP, read, split
from posbench.data.tokens import prepare_all
from posbench.errors import PosbenchError, UserError
from posbench.launch import plans, pool, slurm, states, tuning
from posbench.launch.plans import Plan
from posbench.launch.states import Status
from posbench.results.compare import ENOUGH_SEEDS, REFERENCE
from posbench.run import checkpoint
from posbench.run.run import other_code
from posbench.terminal import console, exits

logger = logging.getLogger(__name__)
LEARNING_TAKES = 2_000_000  # tokens: with fewer most of sweep=six do not beat the n-gram model (docs/results.md)


def sweep(
    arguments: list[str],
    n_jobs: int | None = None,
    config_dir: Path | None = None,
    dry_run: bool = False,
    slurm_options: str | None = None,
) -> list[Plan]:
    """Run every combination of the arguments, then write the report. Returns the plans.

    Args:
        arguments: overrides with comma lists; `sweep=NAME` (configs/sweep), `tune=true`, `tune_grid=[0.5,1,2]`.
        n_jobs: processes at a time; None = one per CPU core or GPU.
        dry_run: run and write nothing; print the commands, and how many runs and tokens that are.
        slurm_options: for sbatch; missing runs are submitted as one array, and nothing is run here.

    Raises:
        PosbenchError: some runs failed; all others are done.
    """
    of_sweep = {key: text for key, text in map(split, arguments) if key in OF_A_SWEEP}
    overrides = [word for word in arguments if split(word)[0] not in of_sweep]
    grid = _grid(of_sweep)
    if "sweep" not in of_sweep and not overrides:
        raise UserError("nothing to compare: give a list, such as encoding=rope,alibi, or sweep=NAME")
    if slurm_options is not None and (n_jobs or grid):
        raise UserError("--slurm submits what is missing and ends: leave out --n-jobs and tune=true")
    todo = plans.resolve(plans.read_sets(of_sweep.get("sweep"), overrides, config_dir), config_dir)
    console.log_to_terminal()
    missing = [plan for plan in todo if not states.is_finished(plan)]
    changed = [line for plan in todo for line in other_code(plan.config, states.record(plan))]
    for line in dict.fromkeys([*changed, *(no_verdicts(todo) if missing else [])]):
        logger.warning("%s", line)
    if dry_run and (slurm_options is None or not missing):
        print(cost([*tuning.trials(todo, grid), *todo]))
        return todo
    if not dry_run:
        prepare_all([plan.config for plan in missing])
    if slurm_options is not None and missing:
        slurm.submit(missing, shlex.split(slurm_options), dry_run)
        return todo
    if grid:
        todo = tuning.tuned(todo, grid, lambda trials: execute(trials, n_jobs))
    status = execute(todo, n_jobs)
    if any(states.is_trained(plan) for plan in todo):
        from posbench import report

        report.main([plan.folder for plan in todo if (plan.folder / "run.json").is_file()])
    if failed := [plan.id for plan in todo if status[plan.id] != states.DONE]:
        states.log_failures(todo, status)
        raise PosbenchError(f"{exits.plural(len(failed), 'run')} of {len(todo)} not done: {', '.join(failed)}")
    return todo


def cost(todo: list[Plan]) -> str:
    """The commands of plans that are not finished, one per line, then how many runs and tokens those are."""
    left = [plan for plan in todo if not states.is_finished(plan)]
    to_train = [plan for plan in left if not (states.is_trained(plan) and checkpoint.every(plan.folder))]
    tokens = sum(plan.config.training.steps * plan.config.training.tokens_per_step for plan in to_train)
    commands = [shlex.join(plan.command) for plan in left if plan.command]  # a trial of a learning rate has none
    counts = f"{exits.plural(len(todo), 'run')}: {len(todo) - len(left)} finished, {len(left)} to do"
    return "\n".join([*commands, f"{counts}, {tokens:,} tokens to train on.", "Nothing was run or written."])


def no_verdicts(todo: list[Plan]) -> list[str]:
    """Say why the report of these runs will lack words, and what to type; empty for one scheme."""
    configs = [plan.config for plan in todo]
    names = {config.encoding.name for config in configs}
    if len({repr(config.encoding) for config in configs}) < 2:
        return []
    seeds = Counter(repr(dataclasses.replace(config, seed=0, start=None)) for config in configs)
    on_text = [config for config in configs if config.data.task is None]
    trained = [config.training.tokens + (config.start.tokens if config.start else 0) for config in on_text]
    lines = []
    if (fewest := min(seeds.values())) < ENOUGH_SEEDS:
        lines.append(f"Verdicts need {ENOUGH_SEEDS} seeds, here {fewest}: type seed=range(0,{ENOUGH_SEEDS}).")
    if on_text and REFERENCE not in names:
        lines.append(f"Schemes are compared with {REFERENCE}, which is not among these: add it to encoding=.")
    if (fewest := min(trained, default=LEARNING_TAKES)) < LEARNING_TAKES:
        short = f"After {fewest:,} tokens most schemes do not beat an n-gram model"
        lines.append(f"{short}: experiment=reader trains for longer.")
    return lines


def _grid(of_sweep: dict[str, str]) -> list[float]:
    """Multiples of the learning rate to try; empty without `tune=true`."""
    if of_sweep.get("tune") != "true":
        if "tune_grid" in of_sweep or of_sweep.get("tune", "false") != "false":
            raise UserError("expected tune=true, with or without tune_grid=0.5,1,2, or tune=false")
        return []
    grid = read(f"[{of_sweep.get('tune_grid', '0.25,0.5,1,2,4').strip('[]')}]")
    if not grid or not all(type(factor) in (int, float) and 0 < factor < math.inf for factor in grid):
        raise UserError(f"tune_grid is {grid}: expected multiples of the learning rate, such as [0.5,1,2]")
    return sorted(map(float, grid))


def execute(todo: list[Plan], n_jobs: int | None) -> dict[str, Status]:
    """Run plans, each in its own process; returns the status of each.

    So many go at a time as there are cores, or GPUs, to each of which a run is confined; a run of several processes has
    one for each of them. More runs than GPUs share these in turn.
    """
    runtime = todo[0].config.runtime
    each, gpus = runtime.processes or 1, [dict[str, str]()]
    on_cpu = machine.resolve(runtime.device).type == "cpu"
    if not on_cpu and runtime.device in ("auto", "cuda"):
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]
        groups = [names[first : first + each] for first in range(0, len(names) - each + 1, each)]
        gpus = [{"CUDA_VISIBLE_DEVICES": ",".join(group)} for group in groups] or gpus
    fit = max(1, machine.cores() // (runtime.threads or 1) // each) if on_cpu else len(gpus)
    n_slots = n_jobs or min(len(todo), fit)
    threads = {"OMP_NUM_THREADS": str(runtime.threads or machine.threads_each(n_slots * each))}
    return pool.run(todo, [gpus[number % len(gpus)] | threads for number in range(n_slots)])
