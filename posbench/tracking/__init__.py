"""The mirror of a run at W&B or in TensorBoard: row n of `rows.jsonl` is step n there.

A session therefore first gets the rows that it lacks. Curves of different encodings
overlay, because training rows have `tokens` as their axis and evaluation rows
`eval/context`. Another tracker is another class in `sessions/`.
"""

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

from posbench import registry
from posbench.config.schema import Config
from posbench.errors import is_own_mistake
from posbench.results.frame import read
from posbench.results.headline import headline
from posbench.run.folder import Run
from posbench.run.rows import EvaluationRow, number
from posbench.tracking.session import CONTEXT, Session, in_sweep

__all__ = ["Tracker", "in_sweep", "mirror", "row_values"]
logger = logging.getLogger(__name__)

# The columns of an evaluation row that are shown, with their names there.
_VALUES = {
    "nll": "loss",
    "accuracy": "accuracy",
    "exact_match": "exact_match",
    "ci_low": "ci_low",
    "ci_high": "ci_high",
}


class Tracker:
    """The mirror of a run. A failure is a warning, with advice: `rows.jsonl` has the
    numbers, and a later session sends them.
    """

    def __init__(self, config: Config, run: Run, advice: str = "") -> None:
        self._config = config
        self._run = run
        self._advice = advice
        self._targets: dict[Any, str | None] = {}
        self._seen = 0
        self.session: Session | None = None

    def send(self) -> None:
        """Send the rows that the session lacks. The first call opens the session."""
        with self._failure_as_warning():
            if self.session is None:
                backend = self._config.tracking.backend
                session_of = registry.load(registry.TRACKERS, backend)
                self.session = session_of(self._config, self._run)
            for row in self._run.rows[self._seen :]:
                values = row_values(row, self._config, self._targets)
                self.session.log(self._seen, values)
                self._seen += 1

    def finish(self) -> None:
        """Send the run's results, and wait for that a limited time."""
        if self.session is None:
            return
        with self._failure_as_warning():
            record = self._run.record
            facts = {
                "status": record.status,
                "reason": record.reason or "",  # an earlier one would stay
                "data/name": self._config.data.name,
                "data/sha256": record.text_sha256,
            }
            for part, count in record.parameters.items():
                facts[f"parameters/{part}"] = count

            # An unfinished run has results, too.
            rows = read([self._run.folder]).assign(run_status="done", repeated=False)
            facts |= headline(rows)
            known = {name: fact for name, fact in facts.items() if fact is not None}
            self.session.finish(record.status, known)

    @contextlib.contextmanager
    def _failure_as_warning(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a tracker may raise anything: no run ends by it
            if is_own_mistake(error):
                raise
            reason = " ".join(str(error).split()) or type(error).__name__
            logger.warning(
                "tracking: %s: the run folder has all rows%s", reason, self._advice
            )
            self.session = None
            self._run.tracker = None


def mirror(config: Config, run: Run) -> None:
    """Give a run its tracker, if its configuration and the environment ask for one."""
    backend = config.tracking.backend
    if backend == "wandb" and os.environ.get("WANDB_MODE") == "disabled":
        return
    advice = ""
    if backend == "wandb":
        advice = ", 'posbench sync' sends them later"
    if backend != "none":
        run.tracker = Tracker(config, run, advice)


def row_values(
    line: Mapping[str, Any], config: Config, targets: dict[Any, str | None]
) -> dict[str, Any]:
    """Return a row's numbers by name. What is not as the run asks for stands in the
    name of its curve. Rows on a curve's first targets, which `targets` keeps, have its
    plain name.
    """
    if "protocol" not in line:  # a row of the training
        return {key: value for key, value in line.items() if number(value) is not None}
    row = EvaluationRow.from_json(line)
    first_targets = row.targets_sha256
    if row.pairs:
        first_targets = targets.setdefault(row.curve, row.targets_sha256)

    parts = ["eval"]
    if row.split != config.evaluation.split:
        parts.append(f"{row.split} text")
    if row.tokens is not None and row.checkpoint_step < config.training.steps:
        parts.append(f"{row.tokens} tokens")
    task = str(row.task).split(":")[0]
    if row.curve_name not in ("fixed_target", f"problems_{task}"):
        parts.append(row.curve_name)
    if row.targets_sha256 != first_targets:
        parts.append(f"targets {str(row.targets_sha256)[:6]}")

    curve = "/".join(parts)
    values: dict[str, Any] = {CONTEXT: row.length}
    if row.status == "ok":
        for column, name in _VALUES.items():
            value = number(line.get(column))
            if value is not None:
                values[f"{curve}/{name}"] = value
    return values
