"""A comparison of many runs. It can be resumed, survives runs that fail, and ends with
the report.

A run is its configuration, so a sweep is a list of plans. Run again, a sweep does what
is missing or failed; the run folders are the only memory it needs.
"""

from collections.abc import Callable
from pathlib import Path

from posbench.config.overrides import OF_A_SWEEP, shell_words, split
from posbench.errors import UserError
from posbench.launch import plans, tuning
from posbench.launch.plans import Plan
from posbench.run import sweeps
from posbench.terminal import console


def sweep(
    arguments: list[str],
    n_jobs: int | None = None,
    config_dir: Path | None = None,
    dry_run: bool = False,
    slurm_options: str | None = None,
    report: Callable[[list[Path]], object] | None = None,
) -> list[Plan]:
    """Run every combination of the arguments, then report; return the plans.

    A dry run only prints the commands, and how many runs and tokens those are. With
    `slurm_options`, missing runs are submitted as one array instead.
    `report` gets the folders of all runs that have begun, once one of them is trained.
    Raises PosbenchError if some runs failed; all others are done.
    """
    overrides = [word for word in arguments if split(word)[0] not in OF_A_SWEEP]
    of_sweep = dict(split(word) for word in arguments if word not in overrides)
    grid = tuning.grid(of_sweep)
    if "sweep" not in of_sweep and not overrides:
        raise UserError(
            "nothing to compare: give a list, such as encoding=rope,alibi, or"
            " sweep=NAME"
        )
    if n_jobs is not None and n_jobs < 1:
        raise UserError(f"n_jobs is {n_jobs}: expected 1 or more runs at a time")
    if slurm_options is not None and (n_jobs or grid):
        raise UserError(
            "--slurm submits what is missing and ends: leave out --n-jobs and tune=true"
        )
    for_slurm = shell_words(slurm_options or "", "--slurm")

    sets = plans.read_sets(of_sweep.get("sweep"), overrides, config_dir)
    todo = plans.resolve(sets, config_dir)
    # they import torch, which a mistake in typing need not wait for
    from posbench.data.tokens import prepare_all
    from posbench.launch import cost, pool, slots, slurm

    console.log_to_terminal()
    trials = tuning.trials(todo, grid)
    must_try = bool(pool.unfinished(trials))
    if grid and not must_try:
        todo = tuning.at_best_rates(todo, grid)
    pool.warn_of_other_code(todo)
    if dry_run:
        print(cost.cost(todo, trials))
        return todo

    missing = pool.unfinished(todo)
    prepare_all([plan.config for plan in missing])
    if must_try:
        slots.execute(trials, n_jobs)
        todo = tuning.at_best_rates(todo, grid)
    sweeps.record([plan.folder for plan in todo], arguments, config_dir)
    if slurm_options is not None and missing:
        slurm.submit(missing, for_slurm)
        return todo
    status = slots.execute(todo, n_jobs)
    if report and any(pool.is_trained(plan) for plan in todo):
        report(pool.begun(todo))
    pool.raise_unfinished(todo, status)
    return todo
