"""A comparison: many runs, resumable, which survives those that fail and ends with the report.

A run is its configuration, so a sweep is a list of configurations, its jobs. Run again, it does what is missing or
failed; the run folders are the only memory it needs.
"""

import json
import logging
import shlex
from pathlib import Path
from typing import Any

from posbench import files, machine
from posbench.config.overrides import OF_A_SWEEP, parted, refuse_twice, value
from posbench.data import corpus
from posbench.data.tokens import prepare_all
from posbench.errors import PosbenchError, UserError
from posbench.launch import plans, pool, slurm, states, table, tuning
from posbench.launch.plans import Plan
from posbench.launch.states import Status
from posbench.run_folder import tracking
from posbench.run_folder.folder import has_weights
from posbench.run_folder.jsonl import listed, number
from posbench.terminal import console, exits

logger = logging.getLogger(__name__)
RECORD = "sweep.json"
_TUNE_GRID = [0.25, 0.5, 1.0, 2.0, 4.0]


def sweep(
    arguments: list[str],
    n_jobs: int | None = None,
    config_dir: Path | None = None,
    dry_run: bool = False,
    slurm_options: str | None = None,
) -> None:
    """Run every combination of the arguments, then write the report.

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
    own, overrides = _parted(arguments)
    grid = _grid(own)
    if "sweep" not in own and not overrides:
        raise UserError("nothing to compare: give a list, such as encoding=rope,alibi, or sweep=NAME")
    if slurm_options is not None and (n_jobs or grid):
        raise UserError("--slurm submits what is missing and ends: leave out --n-jobs and tune=true")
    todo = plans.resolve(plans.read_sets(own.get("sweep"), overrides, config_dir), config_dir)
    console.log_to_terminal()
    options = ["--config-dir", str(config_dir)] if config_dir else []
    command = shlex.join(["posbench", "sweep", *options, *arguments])
    found = [(job, states.is_finished(job)) for job in todo]
    missing = [job for job, finished in found if not finished]
    if dry_run and slurm_options is not None and missing:
        slurm.submit(missing, shlex.split(slurm_options), config_dir, dry_run)
        return
    if dry_run:
        print(cost([*tuning.trials(todo, grid), *todo]))
        return
    left = [job.config for job in missing]
    for line in states.other_code(job for job, finished in found if finished):
        logger.warning("%s", line)
    prepare_all(left)
    if any(map(tracking.is_at_wandb, left)):
        logger.info(
            "W&B: each run writes an offline run into its folder, or is sent as it trains where an API key is set up "
            "(tracking=none turns W&B off)"
        )
    if slurm_options is not None and missing:
        slurm.submit(missing, shlex.split(slurm_options), config_dir, dry_run)
        return
    if grid:
        todo = tuning.tuned(todo, grid, lambda trials: execute(trials, n_jobs))
    status = execute(todo, n_jobs, command)
    _report(todo, status)
    failed = [job for job in todo if status[job.id].name != "done"]
    if failed:
        table.show_failures(todo, status)
        which = ", ".join(job.id for job in failed)
        raise PosbenchError(f"{exits.counted(len(failed), 'run')} of {len(todo)} not done: {which}")


def cost(todo: list[Plan]) -> str:
    """The commands of plans that are not finished, one per line, then how many runs and tokens those are.

    Hours of training are told where a finished run among them is of the same kind, which is all but the seed.

    Raises:
        UserError: as `corpus.local_files`.
    """
    left = [job for job in todo if not states.is_finished(job)]
    for data in {job.config.data.path: job.config.data for job in left if job.config.data.path}.values():
        corpus.local_files(data)
    to_train = [job for job in left if not (states.is_trained(job) and has_weights(job.folder))]
    tokens = sum(job.config.training.steps * job.config.training.tokens_per_step for job in to_train)
    commands = [shlex.join(job.command) for job in left if job.overrides]  # a trial of a learning rate has none
    counts = f"{exits.counted(len(todo), 'run')}: {len(todo) - len(left)} finished, {len(left)} to do"
    trained = len(left) - len(to_train)
    only = f" ({trained} of them trained, their evaluation is left)" if trained else ""
    seconds = {tuning.group(job): states.record(job).get("train_seconds") for job in todo if states.is_trained(job)}
    known = [time for job in to_train if (time := number(seconds.get(tuning.group(job)))) is not None]
    lines = [*commands, f"{counts}{only}, {tokens:,} tokens to train on."]
    if known:
        hours = sum(known) / 3600
        lines.append(f"By finished runs of the same kind, {len(known)} of them train for {hours:.1f} h in all.")
    return "\n".join([*lines, "Nothing was run or written."])


def _parted(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """Arguments of the sweep itself by name, and overrides of the runs."""
    own: dict[str, str] = {}
    overrides = []
    refuse_twice(parted(text)[0] for text in arguments)
    for text in arguments:
        key, typed = parted(text)
        if key in OF_A_SWEEP:
            own[key] = typed
        else:
            overrides.append(text)
    return own, overrides


def _grid(own: dict[str, str]) -> list[float]:
    """Multiples of the learning rate to try; empty without `tune=true`."""
    tune = value(own.get("tune", "false"))
    if not isinstance(tune, bool):
        raise UserError(f"tune is '{own['tune']}': expected true or false")
    if not tune:
        if "tune_grid" in own:
            raise UserError("tune_grid goes with tune=true")
        return []
    given = own.get("tune_grid")
    grid = _TUNE_GRID if given is None else value(f"[{given.strip('[]')}]")
    if not grid or not all(type(factor) in (int, float) and 0 < factor < float("inf") for factor in grid):
        raise UserError(f"tune_grid is '{given}': expected multiples of the learning rate, such as [0.5,1,2]")
    return sorted({float(factor) for factor in grid})


def execute(todo: list[Plan], n_jobs: int | None, command: str | None = None) -> dict[str, Status]:
    """Run plans. Given the sweep's command, `sweep.json` records them."""
    slots = _slots(todo, n_jobs)
    threads = _threads(todo, len(slots))
    todo = [job.with_threads(threads) for job in todo]

    show = table.Lines(todo).show
    return pool.run(todo, slots, _recorded(todo, command, show) if command else show)


def _threads(todo: list[Plan], at_a_time: int) -> int:
    return machine.threads_each(at_a_time * (todo[0].config.runtime.processes or 1))


def _slots(todo: list[Plan], n_jobs: int | None) -> list[dict[str, str]]:
    """The environment of each job that runs at a time: one per core, or per GPU and confined to it.

    A job of several processes has a core or a GPU for each of them.
    """
    runtime = todo[0].config.runtime
    processes = runtime.processes or 1
    device = machine.resolve(runtime.device)
    if device.type != "cpu":
        gpus = pool.gpus(processes) if runtime.device in ("auto", "cuda") else [{}]
        return [dict(gpus[number % len(gpus)]) for number in range(n_jobs or min(len(todo), len(gpus)))]
    fit = max(1, machine.cores() // (runtime.threads or 1) // processes)
    return [{} for _ in range(n_jobs or min(len(todo), fit))]


# -- sweep.json --------------------------------------------------------------------------------------------------------


def _recorded(todo: list[Plan], command: str, show: pool.Show) -> pool.Show:
    """Like `show`, and writes each change into the studies' `sweep.json`."""
    last: dict[str, Status] = {}

    def follow(status: dict[str, Status]) -> None:
        if status != last:
            for study, own in plans.by_study(todo).items():
                _write(study, own, command, status)
            last.update(status)
        show(status)

    return follow


def _write(study: Path, todo: list[Plan], command: str, status: dict[str, Status]) -> None:
    """All jobs that sweeps of this study asked for; of earlier sweeps, those that left a run folder."""
    own = {job.id: _row(job, status[job.id], command) for job in todo}
    path = study / RECORD
    study.mkdir(parents=True, exist_ok=True)
    others = (row for row in listed(path, "cells") if row.get("id") not in own)
    earlier = [row for row in others if (study / str(row.get("id"))).is_dir()]
    content = {"schema": 1, "command": command, "cells": [*earlier, *own.values()]}
    files.write(path, json.dumps(content, indent=2).encode() + b"\n")


def _row(job: Plan, status: Status, command: str) -> dict[str, Any]:
    return {
        "id": job.id,
        "overrides": list(job.overrides),
        "status": status.name,
        "reason": status.reason,
        "message": status.message,
        "command": command,
    }


def _report(todo: list[Plan], status: dict[str, Status]) -> None:
    """Report on the sweep's own runs, whatever else lies in their studies."""
    if any(status[job.id].name == "done" or states.is_trained(job) for job in todo):
        from posbench import report

        report.main([job.folder for job in todo if (job.folder / "run.json").is_file()])
