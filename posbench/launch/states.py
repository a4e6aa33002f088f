"""What run folders say of plans: how far each has come, and how it ended."""

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

from posbench.errors import UserError
from posbench.evaluation.answers import TRAINED, place_of
from posbench.launch.plans import Plan
from posbench.run_folder import folder
from posbench.run_folder.folder import attempt_is_open, load_config, load_record
from posbench.run_folder.jsonl import number
from posbench.run_folder.rows import EvaluationRow, evaluation_rows, newest_of_split

FINAL = ("done", "failed", "stopped", "in use")
_TAIL_BYTES = 4096  # of metrics.jsonl; holds several rows


@dataclasses.dataclass(frozen=True)
class Status:
    """The state of a run."""

    name: str  # waiting, in use, running, done, failed, stopped
    reason: str | None = None  # as in run.json
    message: str | None = None


WAITING, IN_USE, RUNNING = Status("waiting"), Status("in use"), Status("running")


def record(plan: Plan) -> dict[str, Any]:
    """The run's `run.json`; empty if it is missing or cannot be read."""
    try:
        return load_record(plan.folder)
    except UserError:
        return {}


def status(plan: Plan) -> Status:
    """How the last attempt in `run.json` stands, whether or not the process that wrote it is alive.

    A run that is done counts as running while rows are added, and as failed where `reason` says that this ended early.
    """
    found = record(plan)
    reason, message = (None if value is None else str(value) for value in map(found.get, ("reason", "message")))
    name = str(found.get("status", "waiting"))
    if name == "done" and reason is not None:
        name = "failed"
    elif name == "done" and attempt_is_open(found):
        name = "running"
    return Status(name, reason, message)


def is_finished(plan: Plan) -> bool:
    """Whether nothing is left to do. If evaluation settings changed, the run decides what is missing."""
    try:
        held = load_config(plan.folder)
    except UserError:
        return False
    return is_trained(plan) and held.evaluation == plan.config.evaluation


def is_trained(plan: Plan) -> bool:
    """Whether a run of these weights is done, perhaps with other evaluation settings."""
    return record(plan).get("status") == "done"


def other_code(done: Iterable[Plan]) -> list[str]:
    """Lines about encodings that finished runs were trained with, and whose code has changed; each line once."""
    return list(dict.fromkeys(line for plan in done for line in folder.other_code(plan.config, record(plan))))


def before(plan: Plan) -> Status:
    """The state of a run that nobody has looked at yet: done or waiting."""
    return Status("done") if is_finished(plan) else WAITING


def progress(plan: Plan) -> tuple[int, float | None]:
    """Updates made and the newest training loss in nats per token, from the end of `metrics.jsonl`."""
    try:
        with (plan.folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return 0, None
    for line in reversed(lines):
        try:
            row = json.loads(line)
            return int(row["step"]), number(row["train/loss"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue  # a validation row, or one cut short by where the tail begins
    return 0, None


def nll_in_distribution(plan: Plan) -> float | None:
    """Nll in nats per token at the training length, by the first protocol asked for; None if there is none."""
    row = in_distribution(plan)
    return None if row is None else row.nll


def in_distribution(plan: Plan) -> EvaluationRow | None:
    """The newest row at the training length, or at the longest trained problems of a task; None if there is none."""
    settings = plan.config.evaluation
    try:
        rows = evaluation_rows(plan.folder)
    except UserError:
        return None
    own = [row for row in newest_of_split(rows, settings.split) if row.measured]
    return next((row for row in own if row.protocol == settings.protocols[0] and place_of(row) == TRAINED), None)
