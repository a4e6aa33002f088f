"""The run folder: one owner at a time, and records that a kill or a full disk cannot spoil.

`config.yaml` (what was asked), `run.json` (what became of it), `rows.jsonl` (every number), `checkpoint/`, `log.txt`.
The rows of training, validation and evaluation stand in the order in which they were made, which is the same after any
kill: resuming from a step drops the rows after it.
"""

import contextlib
import dataclasses
import importlib.metadata
import io
import itertools
import json
import logging
import os
import platform
import shlex
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from filelock import FileLock, Timeout

import posbench
from posbench import encodings, files
from posbench.config import external
from posbench.config.external import AnyConfig, TrainedElsewhere, TrainedOn, Trains
from posbench.config.identity import NOT_IDENTITY
from posbench.config.schema import Config, EvaluationConfig, flat, to_container
from posbench.errors import InUse, RunFailed, Stopped, UserError
from posbench.run import CONFIG, LOG_TEXT, MODEL, RECORD, ROWS
from posbench.run.rows import plain, read_rows
from posbench.terminal.exits import Escaped

logger = logging.getLogger(__name__)
_SCHEMA = 2  # of run.json and the files beside it
_NEW: dict[str, Any] = {
    "installed_encodings": {},  # the sha256 of their source files when training began, by name; not of ours
    "status": "running",
    "reason": None,
    "message": None,
    "attempt": None,  # the last one
    "parameters": {"total": None, "encoding": None, "non_embedding": None},
    **dict.fromkeys(("tokens", "train_seconds", "cpu_seconds", "evaluate_seconds", "peak_memory_bytes")),
    "data": None,
    "tokenizer_sha256": None,
    "support": None,  # of a model from elsewhere: whether its kind is tested
    "wandb": None,  # where it is mirrored: id, project, entity
    "versions": {},
    "git": {"commit": None, "dirty": None},
}
_PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "datasets", "hydra-core", "pydantic", "wandb")


class Where(NamedTuple):
    """What an attempt computes on and with."""

    device: str
    dtype: str
    threads: int  # of the CPU, in each process
    processes: int = 1  # that train together
    compiled: bool = False  # whether the compiler fuses what lies between attention layers


class Run:
    """The owner of a run folder while the `with` block lasts; made by `Run.open`.

    An error that ends the block of a command that trains is written to `run.json`.
    """

    def __init__(self, folder: Path, config: AnyConfig, command: list[str] | None, held: contextlib.ExitStack) -> None:
        self.folder, self.id, self.config = folder, config.id, config
        self._command = None if command is None else shlex.join(command)
        self._held = held  # until `close`
        self._began = False  # whether this process began an attempt
        self.tracker: Any = None  # a tracking.Tracker, which shows the rows elsewhere
        facts = {"schema": _SCHEMA, "id": self.id, "study": config.study, "encoding": config.encoding.name}
        self.record = {**facts, "seed": config.seed, "command": self._command, **_NEW}
        if (folder / RECORD).exists():
            self.record |= load_record(folder) | {"schema": _SCHEMA}
        else:
            self.update()
        self.rows = read_rows(folder)
        if not (folder / ROWS).exists():
            self._write_rows(self.rows)  # those of an older version, if there are any
        self._file = self._open_rows()

    @classmethod
    def open(cls, folder: Path, config: AnyConfig, command: list[str] | None, restart: bool = False) -> "Run":
        """Take ownership of a run folder, new or old.

        Args:
            config: what the run is, or a model from elsewhere; written down if the folder is new.
            command: the command line that trains, for the record; None: a command that only reads or adds rows.
            restart: move an old folder aside, to `<folder>.old-1`, `-2` ...

        Raises:
            UserError: another process owns the folder, or it holds another run.
        """
        with contextlib.ExitStack() as held, files.full_disk_as_failure(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(owned(folder))
            if restart and folder.exists():
                names = (folder.with_name(f"{folder.name}.old-{number}") for number in itertools.count(1))
                aside = folder.rename(next(name for name in names if not os.path.lexists(name)))
                logger.info("the old run is now in %s", aside)
            folder.mkdir(exist_ok=True)
            files.remove_stale(folder)
            files.remove_stale(folder / "checkpoint")
            existing = held_config(folder, config)
            if existing is None:
                _write_config(folder, config)
            return cls(folder, existing or config, command, held.pop_all())

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        with contextlib.closing(self):
            if isinstance(error, Exception | KeyboardInterrupt) and self._command is not None:
                self.ended_by(error)
            if self.tracker:
                self.tracker.finish()

    def close(self) -> None:
        """Release the folder."""
        self._held.close()

    # -- rows.jsonl ------------------------------------------------------------------------------------------------

    def log(self, row: Mapping[str, Any]) -> None:
        """Append a row, and pass it on to the tracker. What is not finite is null."""
        plain_row: dict[str, Any] = plain(row)
        line = json.dumps(plain_row, allow_nan=False).encode() + b"\n"
        with files.full_disk_as_failure(self.folder / ROWS, len(line)):
            while line:  # half of it may be written before the disk is full: the next opening cuts that away
                line = line[self._file.write(line) :]
        self.rows.append(plain_row)
        if self.tracker:
            self.tracker.log(len(self.rows) - 1, plain_row)

    def sync(self) -> None:
        """Force the rows to the disk."""
        os.fsync(self._file.fileno())

    def cut(self, step: int) -> None:
        """Drop the rows after a step, from which training goes on and makes them again."""
        rows = [row for row in self.rows if (row["checkpoint_step"] if "protocol" in row else row["step"]) <= step]
        if len(rows) < len(self.rows):
            self._write_rows(rows)
            self._file, self.rows = self._open_rows(), rows

    def _open_rows(self) -> io.FileIO:
        """The file of rows at its end, without the half line that a kill may leave."""
        file = self._held.enter_context(open(self.folder / ROWS, "r+b", buffering=0))  # noqa: SIM115
        file.truncate(file.readall().rfind(b"\n") + 1)
        file.seek(0, os.SEEK_END)
        return file

    def _write_rows(self, rows: list[dict[str, Any]]) -> None:
        files.write(self.folder / ROWS, b"".join(json.dumps(row).encode() + b"\n" for row in rows))

    # -- run.json --------------------------------------------------------------------------------------------------

    def update(self, **fields: Any) -> None:
        """Set fields of `run.json`."""
        self.record |= plain(fields)
        files.write(self.folder / RECORD, json.dumps(self.record, indent=2).encode() + b"\n")

    def begin_attempt(self, where: Where, bit_exact: bool = True) -> None:
        """Record that this process starts; `bit_exact`: training goes on as an uninterrupted run would have.

        A run that is done stays done while rows are added, so that a kill takes nothing from it.
        """
        self._began = True
        before, trained = self.record["attempt"] or {}, has_weights(self.folder)
        started = {"started": _utc(), "ended": None, "host": socket.gethostname(), "pid": os.getpid()}
        exact = bit_exact and (before.get("bit_exact", True) or not trained)
        if isinstance(self.config, Config) and not trained:
            encoding = self.config.encoding
            self.record["installed_encodings"] = encodings.installed_files(encoding.name, encoding.options)
        self.update(
            status="done" if self.record["status"] == "done" else "running",
            reason=None,
            message=None,
            command=self._command or self.record["command"],
            attempt={**started, **where._asdict(), "bit_exact": exact, "steps": 0},
            versions=versions(),
            git=_git_state(),
        )

    def update_attempt(self, **fields: Any) -> None:
        """Set fields of the current attempt, such as `steps`, the updates it made."""
        self.update(attempt={**self.record["attempt"], **fields})

    def finish(self, status: str, reason: str | None = None, message: str | None = None) -> None:
        """Record how the attempt ended: `done`, `failed` or `stopped`. A run that is done stays done.

        Args:
            reason: why it failed or was stopped. Beside `done`: why a later attempt, to add rows, ended early.
        """
        status = "done" if self.record["status"] == "done" else status
        ended = {"attempt": {**self.record["attempt"], "ended": _utc()}} if attempt_is_open(self.record) else {}
        self.update(status=status, reason=reason, message=message, **ended)

    def ended_by(self, error: BaseException) -> None:
        """Record what ended the attempt. If that fails too, warn: what ended it is still the error to report.

        A run that is done and was refused before an attempt began is left as it is.
        """
        if self.record["status"] == "done" and not (self._began and attempt_is_open(self.record)):
            return
        if isinstance(error, Stopped | KeyboardInterrupt):
            status, reason, message = "stopped", "signal", str(error) or "interrupted"
        else:
            status, reason, message = "failed", error.reason if isinstance(error, RunFailed) else "error", str(error)
        try:
            self.finish(status, reason, message)
        except (RunFailed, OSError) as failure:
            logger.warning("run.json does not say how the run ended: %s", failure)

    # -- continuing ------------------------------------------------------------------------------------------------

    def as_begun(self, config: Trains) -> Trains:
        """A configuration with what orders the rows as the unfinished run began: so they come again in that order."""
        begun = self.config
        if not self.rows or isinstance(begun, TrainedElsewhere):
            _write_config(self.folder, config)
            return config
        cadence = {name: getattr(begun.runtime, name) for name in ("log_every_steps", "validate_every_steps")}
        runtime = dataclasses.replace(config.runtime, **cadence)
        if runtime != config.runtime or begun.evaluation.at_tokens != config.evaluation.at_tokens:
            logger.warning("%s logs as often, and is evaluated on the way, as it began to", self.folder)
        return dataclasses.replace(config, evaluation=begun.evaluation, runtime=runtime)

    def write_evaluation(self, evaluation: EvaluationConfig) -> None:
        """Let the configuration in the folder say how the trained run was evaluated."""
        existing = load_any_config(self.folder)
        if existing.evaluation != evaluation and self.record["status"] != "done":
            _write_config(self.folder, dataclasses.replace(existing, evaluation=evaluation))

    def refuse_changes(self, text_sha256: str, tokenizer_sha256: str) -> None:
        """Refuse another text or tokenizer than a trained run had; warn of another version of its own encoding.

        Args:
            text_sha256: of the corpus that the run's configuration means now.
        """
        if not has_weights(self.folder):
            return
        before = {"text": (self.record["data"] or {}).get("sha256"), "tokenizer": self.record["tokenizer_sha256"]}
        for what, here in (("text", text_sha256), ("tokenizer", tokenizer_sha256)):
            if before[what] not in (None, here):
                raise UserError(
                    f"{self.folder} was trained on another {what} (sha256 {str(before[what])[:12]}) than its "
                    f"configuration gives now ({here[:12]}): bring that {what} back, or train anew, with study=NAME in "
                    "another study, or with --restart, which moves this run aside"
                )
        for line in other_code(self.config, self.record) if isinstance(self.config, Config) else ():
            logger.warning("%s", line)

    def log_to_file(self) -> None:
        """Copy posbench's log into `log.txt` while the run is owned, one line a record, in UTC."""
        handler = logging.FileHandler(self.folder / LOG_TEXT, encoding="utf-8", errors="backslashreplace")
        formatter = Escaped("%(asctime)s.%(msecs)03d+00:00 %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
        formatter.converter = time.gmtime
        handler.setFormatter(formatter)
        handler.handleError = lambda record: None  # type: ignore[method-assign] # a full disk is said by other records
        log = logging.getLogger("posbench")
        self._held.callback(log.setLevel, log.level)
        self._held.callback(handler.close)
        self._held.callback(log.removeHandler, handler)
        log.setLevel(log.level or logging.INFO)
        log.addHandler(handler)


# -- who owns it -------------------------------------------------------------------------------------------------------


def _lock(folder: Path) -> FileLock:
    """The lock of a run folder, beside it: the folder may be moved. The system frees it when its owner dies."""
    return FileLock(folder.parent / f".{folder.name}.lock", timeout=0.2)  # `in_use` holds it for a moment


@contextlib.contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Own a run folder. Raises InUse if another process does."""
    try:
        lock = _lock(folder).acquire()
    except Timeout:
        raise InUse(f"{folder} is in use by another process: wait for it or stop it") from None
    with lock:
        yield


def in_use(folder: Path) -> bool:
    """Whether a process owns the run folder at this moment."""
    lock = _lock(folder)
    try:
        if os.path.exists(lock.lock_file):
            with lock.acquire(timeout=0):
                pass
    except Timeout:
        return True
    except OSError:  # of another user, perhaps
        pass
    return False


# -- what it records ---------------------------------------------------------------------------------------------------


def _utc() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def versions() -> dict[str, str]:
    """Versions of what a run computes with, by name."""
    found = {"posbench": posbench.__version__, "python": platform.python_version()}
    for name in (*_PACKAGES, "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _git_state() -> dict[str, Any]:
    """Commit of the checkout that posbench runs from, and whether its files were changed; nulls if it is installed."""
    root = Path(posbench.__file__).resolve().parents[1]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if (root / ".git").exists():
            commit, _, dirty = subprocess.check_output(command, text=True, timeout=5).strip().partition("-")
            return {"commit": commit, "dirty": bool(dirty)}
    return {"commit": None, "dirty": None}


def has_weights(folder: Path) -> bool:
    """Whether a run keeps a checkpoint. Rows that were kept of a run have none."""
    return any((folder / "checkpoint").glob("step-*"))


def load_record(folder: Path) -> dict[str, Any]:
    """The `run.json` of a run folder. Raises UserError if it cannot be read, or a newer posbench wrote it."""
    path = folder / RECORD
    try:
        record: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}; --restart starts over") from None
    if (schema := record.get("schema") or 0) > _SCHEMA:
        raise UserError(f"{path} has schema {schema}, this posbench reads up to {_SCHEMA}: upgrade posbench")
    return record


def attempt_is_open(record: Mapping[str, Any]) -> bool:
    """Whether the last attempt of a `run.json` has not ended in words: it is under way, or was killed."""
    attempt = record.get("attempt")
    return attempt is not None and attempt["ended"] is None


def other_code(config: Config, record: Mapping[str, Any]) -> list[str]:
    """A line for each encoding that is not posbench's own and whose source file has changed since training began."""
    if not (trained := record.get("installed_encodings")):
        return []
    now = encodings.installed_files(config.encoding.name, config.encoding.options)
    return [
        f"'{name}' was trained with another version of its file (sha256 {str(trained[name])[:12]}, now {digest[:12]}): "
        "old rows are of that version, new ones of this; --restart trains anew"
        for name, digest in now.items()
        if trained.get(name) not in (None, digest)
    ]


# -- its configuration -------------------------------------------------------------------------------------------------


def load_config(folder: Path) -> Config:
    """The configuration of a run folder. Raises UserError if there is none, or that of a HuggingFace model."""
    config = load_any_config(folder)
    if not isinstance(config, Config):
        model = folder / MODEL if isinstance(config, TrainedOn) else config.model.source
        raise UserError(f"{folder} holds results of a HuggingFace model, not a run: name the model, {model}")
    return config


def load_any_config(folder: Path) -> AnyConfig:
    """The configuration of a run folder, or of a folder with results of a model from elsewhere; else UserError."""
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder} is not a run folder: it has no {CONFIG}")
    return external.load_saved(folder / CONFIG)


def held_config(folder: Path, config: AnyConfig) -> AnyConfig | None:
    """The configuration in a folder if it asks for the same weights, None for a new folder; else UserError."""
    if not (folder / CONFIG).exists():
        return None
    existing = load_any_config(folder)
    if existing.id != config.id:
        was, now = flat(to_container(existing)), flat(to_container(config))
        keys = (key for key in {**was, **now} if key.split(".")[0] not in NOT_IDENTITY and was.get(key) != now.get(key))
        shown = ", ".join(f"{key} {was.get(key)!r} -> {now.get(key)!r}" for key in itertools.islice(keys, 5))
        rest = "choose another folder, start=RUN to go on from its weights, or --restart to move it aside"
        raise UserError(f"{folder} holds another run ({existing.id}): {shown}; {rest}")
    return existing


def _write_config(folder: Path, config: AnyConfig) -> None:
    text = yaml.safe_dump(to_container(config), sort_keys=False, allow_unicode=True)
    files.write(folder / CONFIG, text.encode())
