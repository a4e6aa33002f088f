"""The mirror of the run folder, at a tracker. It may fail, hang or be missing: training neither stops nor waits.

All of W&B (`wandb_session`), its import included, happens in one background thread that is fed by a queue.
TensorBoard's files (`tensorboard`) are written anew from the run folder at each start.
"""

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from posbench.config.external import Trains
from posbench.run_folder.folder import Run
from posbench.run_folder.jsonl import read_jsonl, shortened
from posbench.run_folder.logged import Curves, defined, facts, recorded
from posbench.run_folder.names import EVALUATION, METRICS
from posbench.run_folder.rows import EvaluationRow, evaluation_rows
from posbench.run_folder.wandb_session import Draw, Session, Target, exit_code_of

if TYPE_CHECKING:
    from posbench.run_folder.tensorboard import TensorBoard

logger = logging.getLogger(__name__)
_FINISH_SECONDS = 15.0  # for the rest to be sent
Takes = dict[str, Callable[[Any], object]]  # what a session does with each kind of message


class Mirror:
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


def is_at_wandb(config: Trains) -> bool:
    """Whether a run of this configuration is mirrored to W&B."""
    return config.tracking.backend == "wandb" and os.environ.get("WANDB_MODE") != "disabled"


@contextlib.contextmanager
def mirror(config: Trains, run: Run | None) -> Iterator[Mirror]:
    """The mirror that `config.tracking` names; none without a run. However a run ends, the tracker gets its status."""
    if run is None:
        yield Mirror()
        return
    found = _mirror(config, run)
    try:
        yield found
    finally:
        found.finish(run.record)


def _mirror(config: Trains, run: Run) -> Mirror:
    if is_at_wandb(config):
        return _AtWandb(config, run)
    return _AtTensorBoard(config, run) if config.tracking.backend == "tensorboard" else Mirror()


class _AtWandb(Mirror):
    """A mirror whose session lives in a background thread."""

    def __init__(self, config: Trains, run: Run) -> None:
        self._config = config
        self._run = run
        self._new = not run.record["wandb"]  # nothing of it can be there
        self._metrics_file = run.folder / METRICS
        self._queue: queue.Queue[tuple[str, Any]] = queue.Queue()
        self._facts: dict[str, Any] = {}
        self._broken = False
        self._ended = threading.Event()

    def begin(self) -> None:
        if self.begun:
            return
        self.begun = True
        target = Target.of(self._config, self._run.folder, self._run.id, self._run.record, new=self._new)
        self._run.update(wandb=target.path)
        self._lines = len(read_jsonl(self._run.folder / EVALUATION))
        curves = Curves(self._config, evaluation_rows(self._run.folder))
        self._facts |= facts(self._config, self._run.record)
        self._put("summary", dict(self._facts))
        threading.Thread(target=self._work, args=(target, curves), name="W&B-mirror", daemon=True).start()

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

    def summary(self, values: Mapping[str, Any]) -> None:
        self._facts |= values
        if self.begun:
            self._put("summary", dict(values))

    def finish(self, record: Mapping[str, Any]) -> None:
        if not self.begun:
            return
        self._facts |= facts(self._config, record)
        self._put("finish", (dict(record), self._facts))
        if not self._ended.wait(_FINISH_SECONDS):
            self._give_up(f"no answer within {_FINISH_SECONDS:.0f} s")
            self._abandon()
        self._broken = True  # what comes after is not logged

    def _put(self, kind: str, value: Any) -> None:
        if not self._broken:
            self._queue.put((kind, value))

    def _give_up(self, reason: str) -> None:
        if not self._broken:
            self._broken = True
            logger.warning(
                "W&B is unreachable (%s): continuing without it; metrics are in %s, 'posbench sync' sends them later",
                *(reason, self._metrics_file),
            )

    def _work(self, target: Target, curves: Curves) -> None:
        """In the background thread."""
        try:
            takes = self._opened(target, curves)
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

    def _opened(self, target: Target, curves: Curves) -> Takes:
        session = Session(self._config, target, curves)
        logger.info("W&B: %s", session.where)
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


class _AtTensorBoard(Mirror):
    """The mirror in TensorBoard's files."""

    def __init__(self, config: Trains, run: Run) -> None:
        self._config, self._run = config, run
        self._board: TensorBoard | None = None
        self._summary: dict[str, Any] = {}
        self._replaced = False  # whether a row replaced an earlier one: all are written anew at the end

    def begin(self) -> None:
        if not self.begun:
            self.begun = True
            known = evaluation_rows(self._run.folder)
            self._shown, self._curves = {row.key for row in known}, Curves(self._config, known)
            self._try(self._write_all)

    def metrics(self, row: Mapping[str, Any]) -> None:
        self._log(defined(shortened(row)))

    def curve(self, row: EvaluationRow) -> None:
        if self.begun and row.key in self._shown:  # scored again, on other targets
            self._replaced = True
        else:
            self._log(self._curves.row(row, 0) if self.begun else {})

    def summary(self, values: Mapping[str, Any]) -> None:
        self._summary |= values

    def finish(self, record: Mapping[str, Any]) -> None:
        if self._replaced:
            self._try(self._write_all)
        self._summary |= facts(self._config, record)
        self._try(lambda: self._board.finish(defined(self._summary)) if self._board else None)

    def _write_all(self) -> None:
        from posbench.run_folder.tensorboard import TensorBoard

        self._board = TensorBoard(self._run.folder, recorded(self._config, self._run.folder))

    def _log(self, row: Mapping[str, Any]) -> None:
        if not self.begun:
            self.begin()  # which shows all that is recorded, so this row, too
        elif row:
            self._try(lambda: self._board.log(row) if self._board else None)

    def _try(self, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:  # of TensorBoard, which must not end anything
            self._board = None
            logger.warning("TensorBoard failed (%s): continuing without it", str(error).partition("\n")[0])
