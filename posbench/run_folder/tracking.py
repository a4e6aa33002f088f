"""The mirror of the run folder, at a tracker. It may fail, hang or be missing: training neither stops nor waits.

All of a tracker, its import included, happens in one background thread that is fed by a bounded queue. W&B
(`wandb_session`) has a session only where there is something to log. Any other (`trackers`) also has one where it lacks
rows that the run folder has.
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
from posbench.config.schema import to_container
from posbench.config.trackers import refuse_missing
from posbench.errors import PosbenchError, UserError
from posbench.run_folder import trackers
from posbench.run_folder.folder import Run
from posbench.run_folder.jsonl import read_jsonl, shortened
from posbench.run_folder.logged import Curves, defined, facts, recorded
from posbench.run_folder.names import EVALUATION, METRICS
from posbench.run_folder.rows import EvaluationRow, evaluation_rows
from posbench.run_folder.trackers.base import TrackedRun, Tracker
from posbench.run_folder.wandb_session import Draw, Session, Target, exit_code_of

logger = logging.getLogger(__name__)
_QUEUE_ROWS = 10_000
_FINISH_SECONDS = 15.0  # for the rest to be sent
_WEIGHTS_SECONDS = 600.0  # the same, where weights are part of it
Takes = dict[str, Callable[[Any], object]]  # what a session does with each kind of message


class Mirror:
    """Receives what a run logs. This one, for `tracking=none`, ignores it."""

    begun = False  # whether there was something to log

    def begin(self) -> None:
        """Open the session. Logging opens it, too."""

    def catch_up(self) -> None:
        """Open the session if an earlier one was killed or failed before it had all rows."""

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


def is_at_wandb(config: Trains) -> bool:
    """Whether a run of this configuration is mirrored to W&B."""
    return config.tracking.backend == "wandb" and os.environ.get("WANDB_MODE") != "disabled"


@contextlib.contextmanager
def mirror(config: Trains, run: Run) -> Iterator[Mirror]:
    """The mirror that `config.tracking` names. However the run ends, its tracker gets the status."""
    found = _mirror(config, run)
    try:
        yield found
    finally:
        found.finish(run.record)


def _mirror(config: Trains, run: Run) -> Mirror:
    if is_at_wandb(config):
        return _AtWandb(config, run)
    if config.tracking.backend in ("none", "wandb"):
        return Mirror()
    try:
        refuse_missing(config.tracking)
    except UserError as error:  # of a run folder from elsewhere: what is typed was refused before
        logger.warning("%s: continuing without it", error)
        return Mirror()
    return _AtTracker(config, run)


class _InBackground(Mirror):
    """A mirror whose session lives in a background thread."""

    def __init__(self, config: Trains, run: Run, name: str, failed: str, repaired: str) -> None:
        self._config = config
        self._run = run
        self._name = name
        self._failed, self._repaired = failed, repaired  # what is wrong, and what brings the rows there later
        self._metrics_file = run.folder / METRICS
        self._queue: queue.Queue[tuple[str, Any]] = queue.Queue(_QUEUE_ROWS)
        self._facts: dict[str, Any] = {}
        self._dropped = 0
        self._broken = False
        self._ended = threading.Event()

    def summary(self, values: Mapping[str, Any]) -> None:
        self._facts |= values
        if self.begun:
            self._put("summary", dict(values))

    def finish(self, record: Mapping[str, Any]) -> None:
        if not self.begun:
            return
        allowed = _WEIGHTS_SECONDS if self._config.tracking.weights else _FINISH_SECONDS
        deadline = time.monotonic() + allowed
        self._facts |= facts(self._config, record)
        with contextlib.suppress(queue.Full):
            if not self._broken:
                self._queue.put(("finish", (dict(record), self._facts)), timeout=allowed)
        if not self._ended.wait(max(0.0, deadline - time.monotonic())):
            self._give_up(f"no answer within {allowed:.0f} s")
            self._abandon()
        elif self._dropped and not self._broken:
            logger.warning("%s was too slow: %d rows are only in %s", self._name, self._dropped, self._metrics_file)
        elif not self._broken:
            self._has_all()
        self._broken = True  # what comes after is not logged

    def _start(self, opened: Callable[[], Takes]) -> None:
        """Begin the session; `opened`, called in the thread, opens it."""
        self._facts |= facts(self._config, self._run.record)
        self._put("summary", dict(self._facts))
        threading.Thread(target=self._work, args=(opened,), name=f"{self._name}-mirror", daemon=True).start()

    def _put(self, kind: str, value: Any) -> None:
        if self._broken:
            return
        try:
            self._queue.put_nowait((kind, value))
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1:
                logger.warning("%s is slow: rows it cannot take are only in %s", self._name, self._metrics_file)

    def _give_up(self, reason: str) -> None:
        if not self._broken:
            self._broken = True
            logger.warning(
                "%s (%s): continuing without it; metrics are in %s, %s",
                *(self._failed, reason, self._metrics_file, self._repaired),
            )

    def _work(self, opened: Callable[[], Takes]) -> None:
        """In the background thread."""
        try:
            takes = opened()
            while not self._broken:
                kind, value = self._queue.get()
                takes[kind](value)
                if kind == "finish":
                    break
        except BaseException as error:  # SystemExit too: a tracker must not end anything
            text = str(error).strip().splitlines()
            self._give_up(text[0] if text else type(error).__name__)
        finally:
            self._ended.set()

    def _abandon(self) -> None:
        """End what a session that did not end in time has left behind."""

    def _has_all(self) -> None:
        """Note that the tracker has all rows."""


class _AtWandb(_InBackground):
    def __init__(self, config: Trains, run: Run) -> None:
        super().__init__(config, run, "W&B", "W&B is unreachable", "'posbench sync' sends them later")
        self._new = not run.record["attempts"]  # nothing of it can be at W&B

    def begin(self) -> None:
        if self.begun:
            return
        self.begun = True
        target = Target.of(self._config, self._run.folder, self._run.id, self._run.record, new=self._new)
        self._run.update(wandb=target.path)
        self._lines = len(read_jsonl(self._run.folder / EVALUATION))
        curves = Curves(self._config, evaluation_rows(self._run.folder))
        self._start(lambda: self._opened(target, curves))

    def metrics(self, row: Mapping[str, Any]) -> None:
        self.begin()
        self._put("metrics", dict(row))

    def curve(self, row: EvaluationRow) -> None:
        if not self.begun:
            self.begin()
        else:
            self._lines += 1
        self._put("curve", (row, self._lines))

    def results(self, rows: list[EvaluationRow], draw: Draw) -> None:
        if self.begun:
            self._put("results", (rows, draw))

    def _opened(self, target: Target, curves: Curves) -> Takes:
        session = Session(self._config, target, curves)
        logger.info("%s", session.told)
        return {
            "metrics": session.metrics,
            "curve": lambda item: session.curve(*item),
            "summary": session.summary,
            "results": lambda item: session.results(*item),
            "finish": lambda item: session.finish(exit_code_of(item[0]), item[1]),
        }

    def _abandon(self) -> None:
        """End W&B's upload process: its exit hook waits for that without limit. What it stored can be synced later."""
        with contextlib.suppress(Exception):  # private names: at worst the hook stays
            from wandb.sdk import wandb_setup

            connection: Any = wandb_setup.singleton()._connection
            connection._cleanup()  # unregisters the hook
            connection._proc._process.kill()


class _AtTracker(_InBackground):
    """The mirror at one of `trackers`. `run.json` names the trackers that have all rows."""

    def __init__(self, config: Trains, run: Run) -> None:
        name = config.tracking.backend
        repaired = f"'posbench sync {run.folder} tracking={name}' brings all of it there"
        super().__init__(config, run, name, f"tracking={name} failed", repaired)
        self._replaced = False  # whether a row replaced an earlier one: the tracker must get all rows again

    def begin(self) -> None:
        if self.begun:
            return
        self.begun = True
        note(self._run, self._name, has_all=False)
        try:
            rows = recorded(self._config, self._run.folder)
            self._lines = len(read_jsonl(self._run.folder / EVALUATION))
            known = evaluation_rows(self._run.folder)
            self._shown, self._curves = {row.key for row in known}, Curves(self._config, known)
        except (OSError, UserError) as error:  # a damaged record stops whoever needs it, not the mirror
            self._ended.set()
            self._give_up(str(error))
        else:
            self._start(lambda: self._opened(rows))

    def catch_up(self) -> None:
        if self._name not in _with_all(self._run):
            self.begin()

    def metrics(self, row: Mapping[str, Any]) -> None:
        if not self.begun:
            self.begin()  # which tells the tracker all that is recorded, so this row, too
        else:
            self._put("log", defined(shortened(row)))

    def curve(self, row: EvaluationRow) -> None:
        if not self.begun:
            self.begin()
        elif not self._broken:
            self._lines += 1
            if row.key in self._shown:  # scored again, on other targets or since its blocks were lost
                self._replaced = True
            elif values := self._curves.row(row, self._lines):
                self._put("log", values)

    def finish(self, record: Mapping[str, Any]) -> None:
        if self._replaced and not self._broken:
            with contextlib.suppress(OSError, UserError):  # as for all that is recorded later than a damaged line
                self._put("again", recorded(self._config, self._run.folder))
        super().finish(record)

    def _opened(self, rows: list[dict[str, Any]]) -> Takes:
        tracker = open_tracker(self._config, self._run, rows)

        def again(all_rows: list[dict[str, Any]]) -> None:
            nonlocal tracker
            tracker.finish("running")
            tracker = open_tracker(self._config, self._run, all_rows)

        def finish(item: tuple[dict[str, Any], dict[str, Any]]) -> None:
            tracker.summary(defined(item[1]))
            tracker.finish(str(item[0]["status"]))

        return {
            "log": lambda row: tracker.log(row),
            "summary": lambda values: tracker.summary(defined(values)),
            "again": again,
            "finish": finish,
        }

    def _has_all(self) -> None:
        with contextlib.suppress(OSError, PosbenchError):  # else the next command tells the tracker all once more
            note(self._run, self._name, has_all=True)


def note(run: Run, name: str, has_all: bool) -> None:
    """Write into `run.json` whether a tracker has all rows."""
    others = [each for each in _with_all(run) if each != name]
    run.update(trackers=[*others, name] if has_all else others)


def _with_all(run: Run) -> list[str]:
    told = run.record["trackers"]
    return [name for name in told if isinstance(name, str)] if isinstance(told, list) else []


def open_tracker(config: Trains, run: Run, rows: list[dict[str, Any]]) -> Tracker:
    """Open a session of a run at the tracker that its configuration names. Raises whatever the tracker raises."""
    cls = trackers.load(config.tracking.backend)
    return cls(TrackedRun(run.id, run.folder, to_container(config)), rows)
