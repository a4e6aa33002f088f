"""Weights & Biases as a mirror of the run folder. It may fail, hang or be missing: training neither stops nor waits.

All of W&B, its import included, happens in one background thread that is fed by a bounded queue. There is a session
only where there is something to log.
"""

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from posbench.config.external import Trains
from posbench.run_folder.folder import Run
from posbench.run_folder.jsonl import read_jsonl
from posbench.run_folder.names import EVALUATION
from posbench.run_folder.redaction import redact
from posbench.run_folder.rows import EvaluationRow
from posbench.run_folder.wandb_session import Draw, Session, Target, exit_code_of, facts

logger = logging.getLogger(__name__)
_QUEUE_ROWS = 10_000
_FINISH_SECONDS = 15.0  # for the rest to be sent
_WEIGHTS_SECONDS = 600.0  # the same, where weights are part of it


class Tracker:
    """Receives what a run logs. This one, for `tracking=none`, ignores it."""

    begun = False  # whether there was something to log

    def begin(self) -> None:
        """Open the session. Logging opens it, too."""

    def metrics(self, row: Mapping[str, Any]) -> None:
        """A row of `metrics.jsonl`."""

    def curve(self, row: EvaluationRow) -> None:
        """A row of `evaluation.jsonl`; what is undefined is left out."""

    def summary(self, values: Mapping[str, Any]) -> None:
        """Values that describe the whole run."""

    def results(self, rows: list[EvaluationRow], draw: Draw) -> None:
        """All results: the curve as a table and a picture, files as artifacts. Opens no session."""

    def finish(self, record: Mapping[str, Any]) -> None:
        """Send what is left and the status of the run's record, waiting a bounded time."""


def is_mirrored(config: Trains) -> bool:
    """Whether a run of this configuration is mirrored to W&B."""
    return config.tracking.backend != "none" and os.environ.get("WANDB_MODE") != "disabled"


@contextlib.contextmanager
def mirror(config: Trains, run: Run) -> Iterator[Tracker]:
    """The tracker of `config.tracking`. However the run ends, its status is sent to W&B."""
    tracker = _WandbTracker(config, run) if is_mirrored(config) else Tracker()
    try:
        yield tracker
    finally:
        tracker.finish(run.record)


class _WandbTracker(Tracker):
    def __init__(self, config: Trains, run: Run) -> None:
        self._config = config
        self._run = run
        self._new = not run.record["attempts"]  # nothing of it can be at W&B
        self._metrics_file = run.folder / "metrics.jsonl"
        self._queue: queue.Queue[tuple[str, Any]] = queue.Queue(_QUEUE_ROWS)
        self._facts: dict[str, Any] = {}
        self._dropped = 0
        self._broken = False
        self._ended = threading.Event()

    def begin(self) -> None:
        if self.begun:
            return
        self.begun = True
        target = Target.of(self._config, self._run.folder, self._run.id, self._run.record, new=self._new)
        self._run.update(wandb=target.path)
        self._lines = len(read_jsonl(self._run.folder / EVALUATION))
        self._facts |= facts(self._config, self._run.record)
        self._put("summary", dict(self._facts))
        threading.Thread(target=self._work, args=(target,), name="wandb-mirror", daemon=True).start()

    def metrics(self, row: Mapping[str, Any]) -> None:
        self.begin()
        self._put("metrics", dict(row))

    def curve(self, row: EvaluationRow) -> None:
        if not self.begun:
            self.begin()
        else:
            self._lines += 1
        self._put("curve", (row, self._lines))

    def summary(self, values: Mapping[str, Any]) -> None:
        self._facts |= values
        if self.begun:
            self._put("summary", dict(values))

    def results(self, rows: list[EvaluationRow], draw: Draw) -> None:
        if self.begun:
            self._put("results", (rows, draw))

    def finish(self, record: Mapping[str, Any]) -> None:
        if not self.begun:
            return
        allowed = _WEIGHTS_SECONDS if self._config.tracking.weights else _FINISH_SECONDS
        deadline = time.monotonic() + allowed
        self._facts |= facts(self._config, record)
        with contextlib.suppress(queue.Full):
            if not self._broken:
                exit_code = exit_code_of(record)
                self._queue.put(("finish", (exit_code, self._facts)), timeout=allowed)
        if not self._ended.wait(max(0.0, deadline - time.monotonic())):
            self._give_up(f"no answer within {allowed:.0f} s")
            _end_service()
        elif self._dropped and not self._broken:
            logger.warning("W&B was too slow: %d rows are only in %s", self._dropped, self._metrics_file)
        self._broken = True  # what comes after is not logged

    def _put(self, kind: str, value: Any) -> None:
        if self._broken:
            return
        try:
            self._queue.put_nowait((kind, value))
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1:
                logger.warning("W&B is slow: rows it cannot take are only in %s", self._metrics_file)

    def _give_up(self, reason: str) -> None:
        if not self._broken:
            self._broken = True
            logger.warning(
                "W&B is unreachable (%s): continuing without it; metrics are in %s, 'posbench sync' sends them later",
                redact(reason),
                self._metrics_file,
            )

    def _work(self, target: Target) -> None:
        """In the background thread."""
        try:
            session = Session(self._config, target)
            logger.info("%s", session.told)
            takes: dict[str, Callable[[Any], object]] = {
                "metrics": session.metrics,
                "curve": lambda item: session.curve(*item),
                "summary": session.summary,
                "results": lambda item: session.results(*item),
                "finish": lambda item: session.finish(*item),
            }
            while not self._broken:
                kind, value = self._queue.get()
                takes[kind](value)
                if kind == "finish":
                    break
        except BaseException as error:  # SystemExit too: wandb must not end anything
            text = str(error).strip().splitlines()
            self._give_up(text[0] if text else type(error).__name__)
        finally:
            self._ended.set()


def _end_service() -> None:
    """End W&B's upload process: its exit hook waits for that without limit. What it stored can be synced later."""
    with contextlib.suppress(Exception):  # private names: at worst the hook stays
        from wandb.sdk import wandb_setup

        connection: Any = wandb_setup.singleton()._connection
        connection._cleanup()  # unregisters the hook
        connection._proc._process.kill()
