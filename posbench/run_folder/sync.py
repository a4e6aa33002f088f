"""Send run folders to a tracker from their own files, each row once."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posbench.config.external import TrainedElsewhere, TrainedOn, Trains
from posbench.config.overrides import pairs, value
from posbench.config.schema import TrackingConfig, validate
from posbench.errors import PosbenchError, UserError, did_you_mean, unknown
from posbench.run_folder.folder import Run, load_any_config, load_config
from posbench.run_folder.jsonl import read_jsonl
from posbench.run_folder.logged import LINE, Curves, defined, facts, recorded
from posbench.run_folder.names import EVALUATION, METRICS
from posbench.run_folder.rows import EvaluationRow, evaluation_rows
from posbench.run_folder.wandb_session import Draw, Session, Target, exit_code_of, has_key
from posbench.terminal import console


@dataclasses.dataclass(frozen=True)
class Results:
    """What a run's rows come to."""

    summary: dict[str, Any]  # the run in a few numbers
    draw: Draw  # its curve


ResultsOf = Callable[[Path], Results]  # of a run folder: rooms above this one measure


def sync(folders: list[Path], overrides: list[str], results_of: ResultsOf, anew: bool = False) -> None:
    """Send run folders. Rows that W&B already has, by its counters, are not sent again.

    Args:
        overrides: of the runs' own tracking.*; the tracker is W&B and the mode online unless they are given.
        anew: as new runs at W&B, whatever it has.

    Raises:
        UserError: an override that cannot be read, no API key, or a folder that is no run or in use.
        PosbenchError: the tracker cannot be reached or refuses.
    """
    given, out = _given(overrides), console.stdout()
    for folder in folders:
        if len(folders) > 1 and isinstance(load_any_config(folder), TrainedElsewhere):
            told = f"{folder}: nothing to send, results of a model that was not trained here"
            out.print(told, soft_wrap=True)
            continue
        config = _mirrored(folder)
        where = dataclasses.asdict(config.tracking) | {"backend": "wandb", "mode": "online"} | given
        config = dataclasses.replace(config, tracking=validate(TrackingConfig, where, "tracking"))
        if config.tracking.backend != "wandb":
            out.print(f"{folder}: {_written_anew(config, folder, results_of, anew)}", soft_wrap=True)
            continue
        _refuse_without_key(config)
        with Run.open(folder, config, command=None) as run:
            target = Target.of(config, folder, run.id, run.record)
            moved = {name: getattr(config.tracking, name) for name in ("project", "entity") if name in given}
            again: dict[str, Any] = {"id": f"{target.id}-{time.strftime('%Y%m%d%H%M%S')}"} if anew else {}
            try:
                said = send(config, run, dataclasses.replace(target, **moved, **again), results_of)
            except Exception as error:
                raise PosbenchError(f"W&B did not take {folder}: {str(error).partition(chr(10))[0]}") from error
        out.print(f"{folder}: {said}", soft_wrap=True)


def _mirrored(folder: Path) -> Trains:
    """The configuration of a folder that training wrote. Raises UserError if it holds none, as `load_config`."""
    config = load_any_config(folder)
    return config if isinstance(config, TrainedOn) else load_config(folder)


def _written_anew(config: Trains, folder: Path, results_of: ResultsOf, anew: bool) -> str:
    """Write a run folder's event files for TensorBoard; returns what they hold."""
    if config.tracking.backend != "tensorboard":
        raise UserError(f"tracking is {config.tracking.backend}: expected wandb or tensorboard")
    if anew:
        raise UserError("--anew is for W&B, TensorBoard's files are written anew in any case")
    from posbench.run_folder.tensorboard import TensorBoard

    with Run.open(folder, config, command=None) as run:
        rows = recorded(config, folder)
        if not rows:
            return "nothing to send"
        TensorBoard(folder, rows).finish(defined(facts(config, run.record) | results_of(folder).summary))
    of_evaluation = sum(LINE in row for row in rows)
    return f"{len(rows) - of_evaluation} rows of metrics and {of_evaluation} of evaluation: {folder / 'tensorboard'}"


def send(config: Trains, run: Run, target: Target, results_of: ResultsOf) -> str:
    """Send a run folder and wait until it is there; returns what was sent, and where it is.

    Raises:
        Exception: whatever the client raises.
    """
    metrics, lines = read_jsonl(run.folder / METRICS), read_jsonl(run.folder / EVALUATION)
    rows = evaluation_rows(run.folder)
    if not metrics and not rows:
        return "nothing to send"
    curves, results = Curves(config, rows), results_of(run.folder)
    session = Session(config, target, curves, "offline" if config.tracking.mode == "offline" else "online")
    run.update(wandb=target.path)
    new_metrics = [row for row in metrics if session.metrics(row)]
    new_rows, by_key = 0, {row.key: row for row in rows}
    for at, line in enumerate(lines, start=1):
        evaluated = EvaluationRow.from_json(line)
        if curves.values(evaluated) and evaluated == by_key[evaluated.key] and at > session.line:
            session.curve(evaluated, at)
            new_rows += 1
    if new_rows or not session.line:
        session.results(rows, results.draw)
    session.finish(exit_code_of(run.record), facts(config, run.record) | results.summary)
    said = f"{len(new_metrics)} rows of metrics and {new_rows} of evaluation"
    if not new_metrics and not new_rows:
        said = "nothing new"
    before = len(metrics) - len(new_metrics) + sum(bool(curves.values(row)) for row in rows) - new_rows
    if session.rows < before:
        said += f"; {before - session.rows} earlier rows are missing there, --anew uploads them again as another run"
    return f"{said}: {session.where}"


def _given(overrides: list[str]) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(TrackingConfig) if field.name != "backend"]
    given: dict[str, Any] = {}
    for key, typed in pairs(overrides, "tracking.mode=offline").items():
        name = "backend" if key == "tracking" else key.removeprefix("tracking.")
        if name not in (*names, "backend"):
            taken = f"sync takes {', '.join(f'tracking.{n}' for n in names)}"
            raise unknown("key", key, (), taken, did_you_mean(name, names))
        given[name] = value(f"tracking.{name}", typed)
    return given


def _refuse_without_key(config: Trains) -> None:
    if config.tracking.mode != "offline" and not has_key():
        raise UserError(
            "no W&B API key found: 'wandb login' stores one, WANDB_API_KEY gives one; tracking.mode=offline writes an "
            "offline run instead"
        )
