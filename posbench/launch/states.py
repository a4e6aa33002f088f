"""What run folders say of plans: how far each has come, and how it ended; and how a sweep shows that."""

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from posbench.errors import UserError
from posbench.launch.plans import Plan
from posbench.run.rows import PLAIN, evaluation_rows, training_rows
from posbench.run.run import ADDING, load_config, load_record

logger = logging.getLogger(__name__)


class Status(NamedTuple):
    """The state of a run."""

    name: str  # waiting, in use, running, done, failed, stopped
    reason: str | None = None  # as in run.json
    message: str | None = None


WAITING, IN_USE, RUNNING, DONE = Status("waiting"), Status("in use"), Status("running"), Status("done")


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
    recorded = record(plan)
    name, reason = str(recorded.get("status", "waiting")), recorded.get("reason")
    if name == "done" and reason is not None:
        name = "running" if reason == ADDING else "failed"
    return Status(name, reason, recorded.get("message"))


def is_trained(plan: Plan) -> bool:
    """Whether a run of these weights is done, perhaps with other evaluation settings."""
    return record(plan).get("status") == "done"


def is_finished(plan: Plan) -> bool:
    """Whether nothing is left to do. If evaluation settings changed, the run decides what is missing."""
    try:
        return is_trained(plan) and load_config(plan.folder).evaluation == plan.config.evaluation
    except UserError:
        return False


def loss_at_train_length(plan: Plan) -> float | None:
    """Nats per token at the training length (of a task, at its longest trained problems), of a trained run."""
    settings = plan.config.evaluation
    for row in evaluation_rows(plan.folder):
        plain = row.kind == PLAIN and not row.offset and ":" not in (row.task or "")
        plain = plain and (row.split, row.checkpoint_step) == (settings.split, plan.config.training.steps)
        if plain and row.protocol == settings.protocols[0] and row.length_ratio == 1 and row.measured:
            return row.nll
    return None


def log_progress(todo: list[Plan], status: Mapping[str, Status]) -> None:
    """Log how many runs are done, failed ..., and how far each has come that runs."""
    counts = Counter(each.name for each in status.values())
    logger.info("%s", ", ".join(f"{number} {name}" for name, number in sorted(counts.items())))
    for plan in (plan for plan in todo if status[plan.id] == RUNNING):
        last = (training_rows(plan.folder) or [{"step": 0}])[-1]
        logger.info("  %s: step %s of %s", plan.id, last["step"], plan.config.training.steps)


def log_failures(todo: list[Plan], status: Mapping[str, Status]) -> None:
    """Log the runs that are not done, and values whose every run failed (two or more) while others did not."""
    outcomes = defaultdict(list)
    for plan in todo:
        for override in plan.overrides:
            outcomes[override].append(status[plan.id].name)
        if status[plan.id] != DONE:
            logger.error("not done: %s", line(plan, status[plan.id], todo))
    for override, names in outcomes.items():
        if 2 <= len(names) < len(todo) and set(names) == {"failed"}:
            logger.error("all %d runs with %s failed", len(names), override)


def line(plan: Plan, now: Status, todo: list[Plan]) -> str:
    """How a run stands: its loss if it is done, else what tells it from the others, and the reason."""
    if now == DONE:
        loss = loss_at_train_length(plan)
        return f"{plan.id} done" + (f": {loss:.4f} nats/token at the training length" if loss is not None else "")
    shared = set[str].intersection(*(set(each.overrides) for each in todo))
    differing = " ".join(override for override in plan.overrides if override not in shared)
    why = f" ({now.reason}): {now.message or ''}" if now.reason else ""
    return f"{plan.id} [{differing}] {now.name}{why}"
