"""Weights & Biases as a mirror of the run folder. It may fail, hang or be missing: training neither stops nor waits.

All of W&B, its import included, happens in one background thread that is fed by a bounded queue. Curves of
different encodings overlay in one panel, because training rows have `tokens` and evaluation rows `eval/length` as
their axis.
"""

import contextlib
import logging
import math
import netrc
import os
import queue
import threading
import time
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from posbench.config.schema import Config, to_container
from posbench.runs.folder import Run
from posbench.runs.redaction import redact
from posbench.runs.rows import EvaluationRow

logger = logging.getLogger(__name__)
_QUEUE_ROWS = 10_000
_INIT_SECONDS = 60.0  # for the server to answer; training goes on meanwhile
_FINISH_SECONDS = 15.0  # for the rest to be sent
_CURVE_VALUES = ("nll", "perplexity", "bits_per_byte", "accuracy", "exact_match", "ci_low", "ci_high")


class Tracker:
    """Receives what a run logs; this one, for `tracking=none`, does nothing with it."""

    def metrics(self, row: Mapping[str, Any]) -> None:
        """A row of `metrics.jsonl`."""

    def curve(self, row: EvaluationRow) -> None:
        """A row of `evaluation.jsonl`; what is undefined is left out."""

    def summary(self, values: Mapping[str, Any]) -> None:
        """Values that describe the whole run, such as the number of its parameters."""

    def finish(self, exit_code: int = 0) -> None:
        """Send what is left, waiting a bounded time."""


def start(config: Config, run: Run) -> Tracker:
    """The tracker that `config.tracking` asks for; returns at once."""
    if config.tracking.backend == "none" or os.environ.get("WANDB_MODE") == "disabled":
        return Tracker()
    return _WandbTracker(config, run)


class _WandbTracker(Tracker):
    def __init__(self, config: Config, run: Run) -> None:
        self._config = config
        self._id = run.id
        self._folder = run.folder
        self._metrics_file = run.folder / "metrics.jsonl"
        self._queue: queue.Queue[tuple[str, Any]] = queue.Queue(_QUEUE_ROWS)
        self._dropped = 0
        self._broken = False
        self._ended = threading.Event()
        threading.Thread(target=self._work, name="wandb-mirror", daemon=True).start()

    def metrics(self, row: Mapping[str, Any]) -> None:
        self._put("log", _defined(row))

    def curve(self, row: EvaluationRow) -> None:
        values = _defined({name: getattr(row, name) for name in _CURVE_VALUES})
        if row.status == "ok" and values:
            named = {f"eval/{row.curve_name}/{name}": value for name, value in values.items()}
            self._put("log", {"eval/length": row.length, **named})

    def summary(self, values: Mapping[str, Any]) -> None:
        self._put("summary", _defined(values))

    def finish(self, exit_code: int = 0) -> None:
        deadline = time.monotonic() + _FINISH_SECONDS
        with contextlib.suppress(queue.Full):
            if not self._broken:
                self._queue.put(("finish", exit_code), timeout=_FINISH_SECONDS)
        if not self._ended.wait(max(0.0, deadline - time.monotonic())):
            self._give_up(f"no answer within {_FINISH_SECONDS:.0f} s")
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
                "W&B is unreachable (%s): continuing without it; metrics are in %s", redact(reason), self._metrics_file
            )

    # -- in the background thread ----------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            session = self._begin()
            axes: set[str] = set()
            while not self._broken:
                kind, value = self._queue.get()
                if kind == "finish":
                    session.finish(exit_code=value)
                    break
                if kind == "summary":
                    session.summary.update(value)
                else:
                    for name in value.keys() - axes:
                        axes.add(name)
                        if axis := _axis(name):
                            session.define_metric(name, step_metric=axis)
                    session.log(value)
        except BaseException as error:  # SystemExit too: wandb must not end anything
            text = str(error).strip().splitlines()
            self._give_up(text[0] if text else type(error).__name__)
        finally:
            self._ended.set()

    def _begin(self) -> Any:
        import wandb

        logging.getLogger("wandb").propagate = False  # its diary goes to its own debug.log
        wandb.setup(wandb.Settings(silent=True, quiet=True))  # init's settings come too late for the login's line
        tracking = self._config.tracking
        return wandb.init(
            project=tracking.project,
            entity=tracking.entity,
            id=f"{self._config.study}-{self._id}",
            name=self._id,
            group=tracking.group or self._config.study,
            tags=[self._config.encoding.name, *tracking.tags],
            job_type="train",
            config=to_container(self._config),
            dir=str(self._folder),
            resume="allow",
            mode=choose_mode(tracking.mode, wandb.Settings().base_url),
            settings=wandb.Settings(
                silent=True,
                quiet=True,
                console="off",
                init_timeout=_INIT_SECONDS,
                reinit="create_new",  # several runs in one process do not end each other
                # What the command line, the environment or the code hold stays on this machine.
                save_code=False,
                disable_code=True,
                disable_git=True,
                x_disable_meta=True,
                x_disable_machine_info=True,
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )


def _axis(name: str) -> str | None:
    """The x axis of a metric; None for what is an axis or a plain counter itself."""
    if name == "eval/length" or "/" not in name:
        return None
    return "eval/length" if name.startswith("eval/") else "tokens"


def _defined(row: Mapping[str, Any]) -> dict[str, Any]:
    """Without nulls and what is not finite: a gap in a curve is drawn as a gap."""
    finite = {k: v for k, v in row.items() if not (isinstance(v, float) and not math.isfinite(v))}
    return {key: value for key, value in finite.items() if value is not None}


def choose_mode(asked: str, base_url: str) -> Literal["online", "offline"]:
    """`online` where an API key is found, else `offline`; never asks for a key."""
    wanted = asked if asked != "auto" else os.environ.get("WANDB_MODE", "auto")
    if wanted in ("offline", "dryrun"):
        return "offline"
    if os.environ.get("WANDB_API_KEY") or _netrc_has(urlsplit(base_url).netloc):
        return "online"
    if wanted == "online":
        logger.warning("no W&B API key found: logging offline; 'wandb login' stores one, 'wandb sync' sends the run")
    return "offline"


def _netrc_has(host: str) -> bool:
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    return False


def _end_service() -> None:
    """End W&B's upload process: its exit hook waits for that without limit. What it stored can be synced later."""
    with contextlib.suppress(Exception):  # private names: at worst the hook stays
        from wandb.sdk import wandb_setup

        connection: Any = wandb_setup.singleton()._connection
        connection._cleanup()  # unregisters the hook
        connection._proc._process.kill()
