"""Evaluate finished runs, one after the other, each in as many processes as were asked for."""

from pathlib import Path

from posbench import machine
from posbench.config.overrides import apply
from posbench.errors import PosbenchError, Stopped
from posbench.evaluation import curve
from posbench.launch.ranks import evaluate_together
from posbench.run_folder.folder import load_config
from posbench.terminal import console, exits


def evaluate_runs(folders: list[Path], overrides: list[str]) -> None:
    """Evaluate finished runs and print their curves. A run that fails does not stop the others.

    Args:
        overrides: settings as they are typed, the same for all.

    Raises:
        UserError: a setting that one of the runs cannot meet; nothing was evaluated.
        PosbenchError: some runs were not evaluated; with a single one, its own error.
    """
    asked = {folder: apply(load_config(folder), overrides) for folder in folders}
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
