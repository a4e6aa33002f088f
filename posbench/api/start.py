"""Training and evaluation from Python, as by the commands of the same names; errors are exceptions."""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from posbench.api.run import LoadedRun, load
from posbench.errors import UserError

logger = logging.getLogger(__name__)


def train(overrides: Sequence[str] = (), *, restart: bool = False, config_dir: str | Path | None = None) -> LoadedRun:
    """Train and evaluate as `posbench train` does, in this process. The same overrides continue or complete a run.

    What happens is shown by a bar and the newest line of the log, all of which is in the run's `log.txt`. An interrupt
    saves the run first; so does the kernel's stop button.

    Args:
        overrides: as typed after the command, one string each: ["encoding=alibi", "training.tokens=500000"].
        restart: move an existing run aside and begin anew.
        config_dir: a folder of further YAML files.

    Raises:
        UserError: an override or the data cannot be used, or another process owns the run.
        RunFailed: the run diverged or ran out of memory or disk; what was computed is kept.
        Stopped: it was interrupted and has been saved; the same call continues it.
    """
    from posbench.config.overrides import start_of
    from posbench.launch import plans
    from posbench.launch import run as launch
    from posbench.run_folder import finding

    overrides = _listed(overrides)
    directory = None if config_dir is None else Path(config_dir)
    if (begins := start_of(overrides)) and finding.is_model(begins):
        from posbench.huggingface.finetune import train_model

        with _shown():
            return _told(load(train_model(begins, overrides, restart, directory)))
    plan = plans.resolve_one(overrides, directory)
    with _shown():
        launch.train(plan, restart)
        return _told(load(plan.folder))


def evaluate(run: LoadedRun | str | Path, overrides: Sequence[str] = ()) -> LoadedRun:
    """Evaluate a finished run, or a HuggingFace model, as `posbench evaluate` does; no row is computed twice.

    Args:
        run: what `load` or `train` returned, a run folder, or a HuggingFace model: its folder or its name on the hub.
        overrides: as typed after the command, one string each: ["length=128,256", "extension=yarn"].

    Returns:
        The run with its new rows, or the results of the model; a run that was given stays as it was.

    Raises:
        UserError: it is no run or has no checkpoint, the model cannot be used, or an override cannot.
        RunFailed: memory or the disk is full.
        Stopped: it was interrupted; what was computed is kept.
    """
    from posbench.config.asked import apply
    from posbench.evaluation.job import evaluate_run
    from posbench.run_folder import finding
    from posbench.run_folder.folder import load_config

    if not isinstance(run, LoadedRun) and finding.is_model(str(run)):
        from posbench.huggingface.evaluate import evaluate_model

        with _shown():
            return _told(load(evaluate_model(str(run), _listed(overrides))[0]))
    given = run if isinstance(run, LoadedRun) else load(run)
    asked = apply(load_config(given.folder), _listed(overrides))
    if (asked.processes or 1) > 1:
        raise UserError(
            f"processes is {asked.processes}: from Python one process evaluates, 'posbench evaluate' starts several"
        )
    with _shown():
        evaluate_run(given.folder, asked)
        return _told(load(given.folder))


def _told(run: LoadedRun) -> LoadedRun:
    logger.info("%r", run)
    return run


def _listed(overrides: Sequence[str]) -> list[str]:
    if isinstance(overrides, str):
        raise UserError(f"overrides are a list, a string each: [{', '.join(map(repr, overrides.split()))}]")
    if wrong := next((given for given in overrides if not isinstance(given, str)), None):
        raise UserError(f"cannot read {wrong!r}: expected strings key=value, such as 'encoding=alibi'")
    return list(overrides)


@contextlib.contextmanager
def _shown() -> Iterator[None]:
    """Show the log; restore logging and the number of threads afterwards."""
    import torch

    from posbench.terminal import console

    before = torch.get_num_threads()
    try:
        with console.log_shown():
            yield
    finally:
        torch.set_num_threads(before)
