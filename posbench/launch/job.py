"""Run a plan in this process, or evaluate finished runs.

`python -m posbench.launch.job CONFIG` is for torchrun and the like.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

from posbench.config.identity import run_folder
from posbench.config.schema import Config, load_saved
from posbench.config.sources import refuse_unread
from posbench.errors import PosbenchError, Stopped
from posbench.launch.plans import Plan, plan
from posbench.run_folder.folder import load_config
from posbench.run_folder.rows import evaluation_rows, newest_of_split, on_shared_targets
from posbench.terminal import exits


def run(plan: Plan, restart: bool = False) -> None:
    """Train and evaluate, with log and curve on the terminal, in a process that does nothing else.

    Arguments and errors are those of `ranks.train_together`.
    """
    from posbench import machine
    from posbench.evaluation import curve
    from posbench.launch.ranks import train_together
    from posbench.terminal import console

    console.log_to_terminal()
    machine.keep_freed_memory()
    if train_together(plan, restart):
        curve.print_curves(plan.folder, plan.config.evaluation.split)


def evaluate_runs(folders: list[Path], overrides: list[str]) -> None:
    """Evaluate finished runs one after the other and print their curves. A run that fails does not stop the others.

    Args:
        overrides: settings as they are typed, the same for all.

    Raises:
        UserError: a setting that one of the runs cannot meet; nothing was evaluated.
        PosbenchError: some runs were not evaluated; with a single one, its own error.
    """
    from posbench import machine
    from posbench.config.overrides import apply
    from posbench.evaluation import curve
    from posbench.launch.ranks import evaluate_together
    from posbench.terminal import console

    asked = {folder: apply(_as_far_as_measured(folder), overrides) for folder in folders}
    console.log_to_terminal()
    machine.keep_freed_memory()
    failed = []
    for folder, one in asked.items():
        try:
            evaluate_together(folder, one)
            curve.print_curves(folder, one.settings.split)
        except PosbenchError as error:
            if len(asked) == 1 or isinstance(error, Stopped):
                raise
            exits.report(error)
            failed.append(str(folder))
    if failed:
        raise PosbenchError(f"{len(failed)} of {len(asked)} runs not evaluated: {', '.join(failed)}")


def _as_far_as_measured(folder: Path) -> Config:
    """A run's configuration, with the lengths of its curve if a later evaluation took that farther.

    Without lengths of its own, what is asked for next is then measured at those, and pairs with the curve.
    """
    config = load_config(folder)
    rows = newest_of_split(evaluation_rows(folder), config.evaluation.split)
    curve = on_shared_targets([row for row in rows if row.curve_name == "fixed_target" and row.measured])
    ratios = tuple(sorted({row.length_ratio for row in curve}))
    if not ratios or ratios[-1] <= config.evaluation.ratios[-1]:
        return config
    return dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, ratios=ratios))


# -- from a saved configuration ----------------------------------------------------------------------------------------


def _command_line() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m posbench.launch.job", description="Run a saved configuration, for torchrun and the like."
    )
    parser.add_argument("saved", type=Path, help="config.yaml of a run folder")
    parser.add_argument("--run-dir", type=Path, help="run folder (default: where the configuration belongs)")
    parser.add_argument("--restart", action="store_true", help="move an existing run aside and begin anew")
    given = parser.parse_args()
    config = load_saved(given.saved)
    folder = given.run_dir or run_folder(config)
    refuse_unread(config.data)
    run(plan(config, folder, [sys.executable, "-m", "posbench.launch.job", str(given.saved)]), given.restart)


if __name__ == "__main__":
    exits.tolerant_output()
    sys.exit(exits.run(_command_line))
