"""A comparison of many runs. It can be resumed, survives runs that fail, and ends with
the report.

A run is its configuration, so a sweep is a list of plans. Run again, a sweep does what
is missing or failed; the run folders are the only memory it needs.
"""

import contextlib
import logging
import math
import shlex
import socket
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posbench.config.overrides import OF_A_SWEEP, shell_words, split
from posbench.config.schema import Config
from posbench.data.tokens import prepare_all
from posbench.errors import UserError
from posbench.launch import plans, pool, slots, slurm, tuning
from posbench.launch.plans import Plan
from posbench.run import RECORD, checkpoint, sweeps
from posbench.run.run import load_config, other_code
from posbench.run.saved import load_record
from posbench.terminal import console

logger = logging.getLogger(__name__)
RECENT = 50  # runs, by whose speed hours are told


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
    if slurm_options is not None and (n_jobs or grid):
        raise UserError(
            "--slurm submits what is missing and ends: leave out --n-jobs and tune=true"
        )
    for_slurm = shell_words(slurm_options or "", "--slurm")

    sets = plans.read_sets(of_sweep.get("sweep"), overrides, config_dir)
    todo = plans.resolve(sets, config_dir)
    missing = pool.unfinished(todo)
    console.log_to_terminal()
    warnings = []
    for plan in todo:
        recorded = pool.record(plan)
        if recorded:
            warnings += other_code(plan.config, recorded)
    for line in dict.fromkeys(warnings):
        logger.warning("%s", line)
    if dry_run:
        print(cost([*tuning.trials(todo, grid), *todo]))
        return todo

    prepare_all([plan.config for plan in missing])
    if grid:
        todo = tuning.at_best_rates(todo, grid, n_jobs)
    sweeps.record([plan.folder for plan in todo], arguments, config_dir)
    if slurm_options is not None and missing:
        slurm.submit(missing, for_slurm)
        return todo
    status = slots.execute(todo, n_jobs)
    if report and any(pool.is_trained(plan) for plan in todo):
        report(pool.begun(todo))
    pool.refuse_unfinished(todo, status)
    return todo


def cost(todo: list[Plan]) -> str:
    """Return the commands of plans that are not finished, one per line, then how many
    runs and tokens those are, and how long they take.
    """
    lines = []
    n_finished = 0
    tokens = 0
    seconds = 0.0  # NaN, if no run of such a size was made here
    speeds = speeds_here({plan.folder.parent.parent for plan in todo})
    for plan in todo:
        if pool.is_finished(plan):
            n_finished += 1
            continue
        if plan.command:  # a trial of a learning rate has none
            lines.append(shlex.join(plan.command))
        is_evaluated_only = pool.is_trained(plan) and checkpoint.every(plan.folder)
        if not is_evaluated_only:
            training = plan.config.training
            n_tokens = training.steps * training.tokens_per_step
            tokens += n_tokens
            seconds += n_tokens / speeds.get(size_of(plan.config), math.nan)

    runs = console.plural(len(todo), "run")
    counts = f"{n_finished} finished, {len(todo) - n_finished} to do"
    lines.append(f"{runs}: {counts}, {tokens:,} tokens to train on.")
    if math.isnan(seconds):
        lines.append("How long is not known: no run of such a size was made here.")
    elif seconds:
        hours = f"{seconds / 3600:.1f} hours"
        lines.append(
            f"About {hours} of training, one run at a time, as runs here took."
        )
    lines.append("Nothing was run or written.")
    return "\n".join(lines)


def speeds_here(outputs: set[Path]) -> dict[Any, float]:
    """Return the median tokens per second of runs that this machine has trained, of
    each size, by the newest `RECENT` runs in these folders.
    """
    records = set[Path]()
    for folder in outputs:
        records.update(folder.glob(f"*/*/{RECORD}"))
    newest = sorted(records, key=lambda path: path.stat().st_mtime)[-RECENT:]
    speeds: dict[Any, list[float]] = {}
    for path in newest:
        with contextlib.suppress(UserError):  # a folder that cannot be read
            record = load_record(path.parent)
            is_here = record.attempt.get("host") == socket.gethostname()
            if record.status == "done" and is_here and record.train_seconds:
                speed = (record.tokens or 0) / record.train_seconds
                size = size_of(load_config(path.parent))
                speeds.setdefault(size, []).append(speed)
    return {size: statistics.median(each) for size, each in speeds.items()}


def size_of(config: Config) -> Any:
    """Return what the speed of a run depends on most, whatever its encoding."""
    return config.model, config.training.train_length, config.training.optimizer
