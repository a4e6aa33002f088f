"""Run a plan in this process, or evaluate finished runs.

Hydra calls `main` for each run of a multirun. `python -m posbench.launch.job CONFIG` is for torchrun and the like.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from posbench.config.identity import run_folder
from posbench.config.schema import Config, load_saved
from posbench.config.shipped import configs_dir
from posbench.config.sources import refuse_unread
from posbench.errors import PosbenchError, Stopped, UserError
from posbench.launch.plans import Plan, plan
from posbench.run_folder.folder import load_config
from posbench.run_folder.rows import evaluation_rows, newest_of_split, on_shared_targets
from posbench.terminal import exits

# Environment variables, not keys: they are no part of a run's identity, and Hydra's launchers hand them on to jobs.
RESTART = "POSBENCH_RESTART"  # "1": move existing runs aside
FAILURES = "POSBENCH_FAILURES"  # file to which the jobs of a multirun append how they failed


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


# -- by Hydra ----------------------------------------------------------------------------------------------------------


def run_with_hydra(arguments: list[str], restart: bool = False) -> None:
    """Hand a checked command line to Hydra, which calls `main` once, or once per combination with --multirun.

    Hydra raises its errors instead of printing them.
    """
    import hydra

    if restart:
        os.environ[RESTART] = "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise instead of printing and exiting
    before, sys.argv = sys.argv, ["posbench train", *arguments]
    try:
        hydra.main(version_base="1.3", config_path=str(configs_dir()), config_name="train")(main)()
    finally:
        sys.argv = before


def main(cfg: DictConfig) -> float | None:
    """One run as Hydra composed it. In a multirun a failure is recorded and does not stop the others.

    Returns:
        What a sweeper optimises (`objective`); None where the run failed or it was not measured.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from posbench.config.compose import config_of

    exits.tolerant_output()  # a launcher's process is its own
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    overrides = list(hydra.overrides.task)
    try:
        restart = os.environ.get(RESTART) == "1"
        config = config_of(cfg, folder.parent)
        run(plan(config, folder, ["posbench", "train", *overrides]), restart)
        from posbench.evaluation.headline import objective

        return objective(folder, config.runtime.objective)
    except Exception as error:
        code = exits.report(error)
        with contextlib.suppress(OSError):
            folder.rmdir()  # Hydra made it; only an empty one goes
        if hydra.mode != RunMode.MULTIRUN or FAILURES not in os.environ or isinstance(error, Stopped):
            raise SystemExit(code) from None
        failed = os.path.relpath(folder) if folder.exists() else " ".join(overrides)
        with open(os.environ[FAILURES], "a", encoding="utf-8") as file:
            file.write(json.dumps({"job": failed, "message": exits.one_line(str(error))}) + "\n")
        return None


def failures(path: Path) -> list[str]:
    """What the jobs of a multirun recorded: their folders (overrides where none was made) and messages."""
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [f"{row['job']} ({row['message']})" for row in rows]


def best(study: Path, since: float) -> str | None:
    """What Hydra's Optuna sweeper wrote into the study after a time, in one line; None where it wrote nothing.

    Its own log, which says the same, is Hydra's and switched off.
    """
    from posbench.config import plain_yaml

    path = study / "optimization_results.yaml"
    if not path.is_file() or path.stat().st_mtime < since:
        return None
    found = plain_yaml.load(path)
    value, chosen = (found.get(name) for name in ("best_value", "best_params")) if isinstance(found, dict) else (0, 0)
    if not isinstance(value, float) or not isinstance(chosen, dict):
        return None
    return " ".join([f"{value:.6g} with", *(f"{key}={setting}" for key, setting in chosen.items())])


def _run_id(*, _root_: DictConfig, _parent_: DictConfig) -> str:
    """The run's name, for Hydra's folder. A combination that is no run gets a name too, and fails in its own turn."""
    from posbench.config.compose import config_of

    of_sweep = "subdir" in set(_parent_)  # `in _parent_` would resolve it, which asks for the name again, and so on
    study = Path(_parent_.dir) if of_sweep else None
    try:
        return run_folder(config_of(_root_, study), study).name
    except UserError:
        return "invalid"


OmegaConf.register_new_resolver("posbench.run_id", _run_id, replace=True)


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
