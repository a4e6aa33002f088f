"""The run folder: one owner at a time, and records that a kill or a full disk cannot
spoil.

`config.yaml` has the settings, `run.json` the outcome, and `rows.jsonl` every number in
the order in which they were made. A kill does not change that order: resuming from a
step drops the rows after it.
"""

import contextlib
import dataclasses
import importlib.metadata
import itertools
import json
import logging
import os
import platform
import shlex
import socket
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

import posbench
from posbench import encodings, files
from posbench.config.schema import (
    AnyConfig,
    Config,
    load_saved,
    to_container,
)
from posbench.errors import InUse, RunFailed, Stopped, UserError
from posbench.run import CONFIG, RECORD, ROWS, checkpoint
from posbench.run.rows import plain, read_rows

logger = logging.getLogger(__name__)
ADDING = "running"  # the reason in the record of a finished run while rows are added
_UNKNOWN = (
    "reason",
    "message",
    "attempt",
    "command",
    "tokens",
    "train_seconds",
    "cpu_seconds",
    "evaluate_seconds",
    "peak_memory_bytes",
    "data",
    "tokenizer_sha256",
    "support",
    "wandb",
)


class Run:
    """The owner of a run folder; made by `Run.open`."""

    def __init__(
        self,
        folder: Path,
        config: AnyConfig,
        command: str | None,
        stack: contextlib.ExitStack,
    ) -> None:
        self.folder = folder
        self.id = config.id
        self.config = config
        self._command = command
        self._stack = stack
        self.tracker: Any = None  # a tracking.Tracker, which shows the rows elsewhere
        if not (folder / CONFIG).exists():
            self.write_config(config)
        fields = {
            "schema": 2,
            "id": self.id,
            "status": "running",
            "command": command,
            "parameters": {},
        }
        self.record: dict[str, Any] = dict.fromkeys(_UNKNOWN) | fields
        if (folder / RECORD).exists():
            self.record |= load_record(folder)
        else:
            self.update()
        self._open_rows()

    @classmethod
    @contextlib.contextmanager
    def open(
        cls,
        folder: Path,
        config: AnyConfig,
        command: list[str] | None,
        restart: bool = False,
    ) -> Iterator["Run"]:
        """Own a run folder, new or old. Raises InUse if another process has it,
        UserError if it holds another run.

        `command`: the command line of a training, whose final error is recorded; None
        only adds rows. `restart` moves an old folder aside, to `<folder>.old-1`, `-2`
        ...; so does training anew after all weights are lost.
        """
        with contextlib.ExitStack() as stack:
            with files.full_disk_as_failure(folder):
                folder.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(owned(folder))
                if (
                    not restart
                    and command is not None
                    and config.is_trained_here
                    and (folder / RECORD).exists()
                ):
                    restart = load_record(folder)[
                        "status"
                    ] == "done" and not checkpoint.every(folder)
                if restart and folder.exists():
                    names = (
                        folder.with_name(f"{folder.name}.old-{number}")
                        for number in itertools.count(1)
                    )
                    moved = folder.rename(
                        next(name for name in names if not os.path.lexists(name))
                    )
                    logger.info("the old run is now in %s", moved)
                folder.mkdir(exist_ok=True)
                for path in (folder, folder / "checkpoint"):
                    files.remove_stale(path)
                existing = (
                    load_saved(folder / CONFIG)
                    if (folder / CONFIG).exists()
                    else config
                )
                if existing.id != config.id:
                    hint = (
                        "choose another folder, start=RUN to go on from its weights, or"
                        " --restart to move it aside"
                    )
                    raise UserError(
                        f"{folder} holds another run ({existing.id}): {hint}"
                    )
                run = cls(
                    folder,
                    existing,
                    shlex.join(command) if command is not None else None,
                    stack,
                )
            try:
                yield run
            except (Exception, KeyboardInterrupt) as error:
                if command is not None:
                    run.ended_by(error)
                raise
            finally:
                if run.tracker:
                    run.tracker.finish()

    def log(self, row: Mapping[str, Any]) -> None:
        """Append a row, and pass it on to the tracker. What is not finite is null."""
        finite = plain(row)
        line = json.dumps(finite, allow_nan=False).encode() + b"\n"
        with files.full_disk_as_failure(self.folder / ROWS, len(line)):
            # half of it may be written before the disk is full: the next opening cuts
            # that away
            while line:
                line = line[self._file.write(line) :]
        self.rows.append(finite)
        if self.tracker:
            self.tracker.send()

    def sync(self) -> None:
        """Force the rows to the disk."""
        os.fsync(self._file.fileno())

    def cut(self, step: int) -> None:
        """Drop the rows after a step: training makes them again."""
        rows = [
            row
            for row in self.rows
            if row["checkpoint_step" if "protocol" in row else "step"] <= step
        ]
        if rows != self.rows:
            files.write(
                self.folder / ROWS,
                "".join(json.dumps(row) + "\n" for row in rows).encode(),
            )
            self._open_rows()

    def _open_rows(self) -> None:
        """Open the file of rows at its end, without the half line that a kill may
        leave.
        """
        file = open(self.folder / ROWS, "a+b", buffering=0)  # noqa: SIM115
        self._file = self._stack.enter_context(file)
        self._file.seek(0)
        self._file.truncate(self._file.readall().rfind(b"\n") + 1)
        self.rows = read_rows(self.folder)

    def update(self, **fields: Any) -> None:
        """Set fields of `run.json`."""
        self.record |= plain(fields)
        files.write(
            self.folder / RECORD, json.dumps(self.record, indent=2).encode() + b"\n"
        )

    def begin_attempt(self, **resources: Any) -> None:
        """Record that this process starts, and its resources. A run that is done stays
        done while rows are added.
        """
        if self.config.is_trained_here and not checkpoint.every(self.folder):
            encoding = self.config.encoding
            used = (
                {}
                if encoding.file
                else encodings.installed_files(encoding.name, encoding.options)
            )
            # without weights it trains anew
            self.record |= {"installed_encodings": used, "status": "running"}
        process = {
            "started": str(datetime.now(UTC)),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        status, reason = (
            ("done", ADDING) if self.record["status"] == "done" else ("running", None)
        )
        trains = (
            {}
            if status == "done"
            else {"attempt": process | resources, "versions": versions()}
        )
        command = self._command or self.record["command"]
        self.update(
            status=status, reason=reason, message=None, command=command, **trains
        )

    def finish(
        self, status: str, reason: str | None = None, message: str | None = None
    ) -> None:
        """Record how the attempt ended and why: `done`, `failed` or `stopped`. A run
        that is done stays done.
        """
        self.update(
            status="done" if self.record["status"] == "done" else status,
            reason=reason,
            message=message,
        )

    def ended_by(self, error: BaseException) -> None:
        """Record the error that ended the attempt. A run that is done stays as it is if
        no attempt had begun.
        """
        if self.record["status"] != "done" or self.record["reason"] == ADDING:
            stopped = isinstance(error, Stopped | KeyboardInterrupt)
            reason = (
                "signal"
                if stopped
                else error.reason
                if isinstance(error, RunFailed)
                else "error"
            )
            self.finish(
                "stopped" if stopped else "failed",
                reason,
                str(error) or type(error).__name__,
            )

    def as_begun(self, config: Config) -> Config:
        """Record and return a configuration. A begun run keeps cadence and evaluation,
        and so the order of its rows.
        """
        if self.rows:
            original = load_config(self.folder)
            cadence = {
                name: getattr(original.runtime, name)
                for name in ("log_every_steps", "validate_every_steps")
            }
            runtime = dataclasses.replace(config.runtime, **cadence)
            config = dataclasses.replace(
                config, evaluation=original.evaluation, runtime=runtime
            )
        self.write_config(config)
        return config

    def write_config(self, config: AnyConfig) -> None:
        """Write this configuration of the run into its folder."""
        self.config = config
        text = yaml.safe_dump(to_container(config), sort_keys=False, allow_unicode=True)
        files.write(self.folder / CONFIG, text.encode())

    def refuse_changes(self, text_sha256: str, tokenizer_sha256: str) -> None:
        """Refuse another text or tokenizer than the run was trained with; warn if its
        encoding's file has changed.
        """
        if not checkpoint.every(self.folder):
            return
        text, tokenizer = (
            (self.record["data"] or {}).get("sha256"),
            self.record["tokenizer_sha256"],
        )
        for noun, recorded, current in (
            ("text", text, text_sha256),
            ("tokenizer", tokenizer, tokenizer_sha256),
        ):
            if recorded not in (None, current):
                hint = (
                    "restore that text, or train anew with study=NAME, or --restart,"
                    " which moves this run aside"
                )
                raise UserError(
                    f"{self.folder} was trained on another {noun} than its"
                    f" configuration gives now: {hint}"
                )
        for warning in other_code(self.config, self.record):
            logger.warning("%s", warning)


def _lock(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.lock"  # beside it: the folder may be moved


def owned(folder: Path) -> contextlib.AbstractContextManager[object]:
    """Own a run folder; the system frees it when its owner dies. Raises InUse if
    another process has it.
    """
    try:
        # `in_use` may hold the lock for a moment
        return FileLock(_lock(folder), timeout=0.2).acquire()
    except Timeout:
        raise InUse(
            f"{folder} is in use by another process: wait for it or stop it"
        ) from None


def in_use(folder: Path) -> bool:
    """Return whether a process owns the run folder at this moment."""
    try:
        with (
            FileLock(_lock(folder), timeout=0)
            if _lock(folder).exists()
            else contextlib.nullcontext()
        ):
            return False
    except OSError as error:  # others: perhaps another user's file
        return isinstance(error, Timeout)


def versions() -> dict[str, str]:
    """Return versions of what a run computes with, by name."""
    by_name = {"posbench": posbench.__version__, "python": platform.python_version()}
    for name in (
        "torch",
        "numpy",
        "safetensors",
        "tokenizers",
        "datasets",
        "wandb",
        "transformers",
    ):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            by_name[name] = importlib.metadata.version(name)
    return by_name


def load_record(folder: Path) -> dict[str, Any]:
    """Return the `run.json` of a run folder. Raises UserError if it cannot be read."""
    path = folder / RECORD
    try:
        record: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}; --restart starts over") from None
    return record


def other_code(config: AnyConfig, record: Mapping[str, Any]) -> list[str]:
    """Return a line for each encoding from outside of posbench whose source file has
    changed since training began.
    """
    recorded = record.get("installed_encodings") or {}
    current = (
        encodings.installed_files(config.encoding.name, config.encoding.options)
        if recorded
        else {}
    )
    notice = (
        "was trained with another version of its file: old rows are of that version,"
        " --restart trains anew"
    )
    return [
        f"'{name}' {notice}"
        for name, digest in current.items()
        if recorded.get(name, digest) != digest
    ]


def load_config(folder: Path) -> Config:
    """Return the configuration of a run folder. Raises UserError if there is none or it
    is a HuggingFace model's.
    """
    config = load_saved(folder / CONFIG)
    if not config.is_trained_here:
        raise UserError(
            f"{folder} holds results of a HuggingFace model, not a run: name the model"
        )
    return config
