"""A comparison: many runs, resumable, which survives those that fail and ends with the report.

A run is its configuration, so a sweep is a list of plans. Run again, it does what is missing or failed; the run folders
are the only memory it needs.
"""

import dataclasses
import logging
import shlex
from collections import Counter
from pathlib import Path

from posbench import machine
from posbench.config.overrides import OF_A_SWEEP, read, split
from posbench.data import paths
from posbench.data.tokens import prepare_all
from posbench.errors import PosbenchError, UserError
from posbench.launch import plans, pool, slurm, states, tuning
from posbench.launch.plans import Plan
from posbench.launch.states import Status
from posbench.results.compare import ENOUGH_SEEDS
from posbench.run import tracking
from posbench.run.run import has_weights, other_code
from posbench.terminal import console, exits

logger = logging.getLogger(__name__)
LEARNING_TAKES = 2_000_000  # tokens: with fewer most of sweep=six do not beat the n-gram model (docs/results.md)
_TUNE_GRID = [0.25, 0.5, 1.0, 2.0, 4.0]


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
        config_dir: a folder of further YAML files.
        dry_run: run and write nothing; print the commands, and how many runs and tokens that are.
        slurm_options: for sbatch; missing runs are submitted as one array, and nothing is run here.

    Raises:
        UserError: a mistake in the arguments; nothing was run.
        Stopped: a signal; what was running has saved itself.
        PosbenchError: some runs failed; all others are done.
    """
    own = {key: typed for key, typed in map(split, arguments) if key in OF_A_SWEEP}
    overrides = [text for text in arguments if split(text)[0] not in own]
    grid = _grid(own)
    if "sweep" not in own and not overrides:
        raise UserError("nothing to compare: give a list, such as encoding=rope,alibi, or sweep=NAME")
    if slurm_options is not None and (n_jobs or grid):
        raise UserError("--slurm submits what is missing and ends: leave out --n-jobs and tune=true")
    todo = plans.resolve(plans.read_sets(own.get("sweep"), overrides, config_dir), config_dir)
    console.log_to_terminal()
    missing = [plan for plan in todo if not states.is_finished(plan)]
    for line in no_verdicts(todo) if missing else []:
        logger.warning("%s", line)
    if dry_run and (slurm_options is None or not missing):
        print(cost([*tuning.trials(todo, grid), *todo]))
        return todo
    if not dry_run:
        for line in dict.fromkeys(line for plan in todo for line in other_code(plan.config, states.record(plan))):
            logger.warning("%s", line)
        prepare_all([plan.config for plan in missing])
        if any(tracking.is_at_wandb(plan.config) for plan in missing):
            logger.info(
                "W&B: each run writes an offline run into its folder, or is sent as it trains where an API key is set "
                "up (tracking=none turns W&B off)"
            )
    if slurm_options is not None and missing:
        slurm.submit(missing, shlex.split(slurm_options), config_dir, dry_run)
        return todo
    if grid:
        todo = tuning.tuned(todo, grid, lambda trials: execute(trials, n_jobs))
    status = execute(todo, n_jobs)
    _report(todo, status)
    if failed := [plan.id for plan in todo if status[plan.id].name != "done"]:
        states.show_failures(todo, status)
        counted = exits.plural(len(failed), "run")
        raise PosbenchError(f"{counted} of {len(todo)} not done: {', '.join(failed)}")
    return todo


def cost(todo: list[Plan]) -> str:
    """The commands of plans that are not finished, one per line, then how many runs and tokens those are.

    Raises:
        UserError: as `paths.local_files`.
    """
    left = [plan for plan in todo if not states.is_finished(plan)]
    for data in {plan.config.data.path: plan.config.data for plan in left if plan.config.data.path}.values():
        paths.local_files(data)
    to_train = [plan for plan in left if not (states.is_trained(plan) and has_weights(plan.folder))]
    tokens = sum(plan.config.training.steps * plan.config.training.tokens_per_step for plan in to_train)
    commands = [shlex.join(plan.command) for plan in left if plan.overrides]  # a trial of a learning rate has none
    counts = f"{exits.plural(len(todo), 'run')}: {len(todo) - len(left)} finished, {len(left)} to do"
    trained = len(left) - len(to_train)
    only = f" ({trained} of them trained, their evaluation is left)" if trained else ""
    lines = [*commands, f"{counts}{only}, {tokens:,} tokens to train on."]
    return "\n".join([*lines, "Nothing was run or written."])


def no_verdicts(todo: list[Plan]) -> list[str]:
    """Say in at most two lines why the report of these runs will lack words, and what to type; empty for one scheme."""
    configs = [plan.config for plan in todo]
    if len({repr(config.encoding) for config in configs}) < 2:
        return []
    seeds = Counter(repr(dataclasses.replace(config, seed=0, start=None)) for config in configs)
    texts = {repr(config.data) for config in configs if config.data.task is None}
    trained = [
        config.training.tokens + (config.start.tokens if config.start else 0)
        for config in configs
        if config.data.task is None
    ]
    reasons = []
    if (fewest := min(seeds.values())) < ENOUGH_SEEDS:
        reasons.append(f"Verdicts need {ENOUGH_SEEDS} seeds, here {fewest}: type seed=range(0,{ENOUGH_SEEDS}).")
    if len(texts) > 1:
        reasons.append(f"Runs on {len(texts)} texts or tokenizers are compared within each alone.")
    lines = [" ".join(reasons)] if reasons else []
    if min(trained, default=LEARNING_TAKES) < LEARNING_TAKES:
        lines.append(
            f"After {min(trained):,} tokens most schemes do not beat an n-gram model, so that rises and reach have no "
            "words: experiment=reader trains for longer."
        )
    return lines


def _grid(own: dict[str, str]) -> list[float]:
    """Multiples of the learning rate to try; empty without `tune=true`."""
    if (typed := own.get("tune", "false")) not in ("true", "false"):
        raise UserError(f"tune is '{typed}': expected true or false")
    if typed == "false":
        if "tune_grid" in own:
            raise UserError("tune_grid goes with tune=true")
        return []
    given = own.get("tune_grid")
    grid = _TUNE_GRID if given is None else read(f"[{given.strip('[]')}]")
    if not grid or not all(type(factor) in (int, float) and 0 < factor < float("inf") for factor in grid):
        raise UserError(f"tune_grid is '{given}': expected multiples of the learning rate, such as [0.5,1,2]")
    return sorted({float(factor) for factor in grid})


def execute(todo: list[Plan], n_jobs: int | None) -> dict[str, Status]:
    """Run plans, each in its own process, and show how they stand. The cores are shared out among them."""
    slots = _slots(todo, n_jobs)
    threads = machine.threads_each(len(slots) * (todo[0].config.runtime.processes or 1))
    todo = [plan.with_threads(threads) for plan in todo]
    return pool.run(todo, slots, states.Lines(todo).show)


def _slots(todo: list[Plan], n_jobs: int | None) -> list[dict[str, str]]:
    """The environment of each run that goes at a time: one per core, or per GPU and confined to it.

    A run of several processes has a core or a GPU for each of them. More runs than GPUs share these in turn.
    """
    runtime = todo[0].config.runtime
    processes = runtime.processes or 1
    if machine.resolve(runtime.device).type != "cpu":
        gpus = pool.gpus(processes) if runtime.device in ("auto", "cuda") else [{}]
        return [dict(gpus[number % len(gpus)]) for number in range(n_jobs or min(len(todo), len(gpus)))]
    fit = max(1, machine.cores() // (runtime.threads or 1) // processes)
    return [{} for _ in range(n_jobs or min(len(todo), fit))]


def _report(todo: list[Plan], status: dict[str, Status]) -> None:
    """Report on the sweep's own runs, whatever else lies in their studies."""
    if any(status[plan.id].name == "done" or states.is_trained(plan) for plan in todo):
        from posbench import report

        report.main([plan.folder for plan in todo if (plan.folder / "run.json").is_file()])
