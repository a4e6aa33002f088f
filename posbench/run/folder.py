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
from posbench.config.overrides import apply
from posbench.config.schema import (
    AnyConfig,
    Config,
    load_saved,
    to_container,
)
from posbench.errors import InUse, RowsFailed, RunFailed, Stopped, UserError
from posbench.run import CONFIG, RECORD, ROWS, checkpoint
from posbench.run.rows import evaluation_rows, json_plain, rows_and_faults, step_of
from posbench.run.saved import RESTART, RunRecord, load_any, load_record

logger = logging.getLogger(__name__)
ADDING = "running"  # the reason in the record of a finished run while rows are added


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
        if (folder / RECORD).exists():
            self.record = load_record(folder)
        else:
            self.record = RunRecord(id=self.id, status="running", command=command)
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
        only adds rows to a run that exists. `restart` moves an old folder aside, to
        `<folder>.old-1`, `-2` ...; so does training anew after all weights are lost.
        """
        if command is None and not (folder / RECORD).exists():
            raise UserError(f"{folder} holds no run: 'posbench train' makes one")
        with contextlib.ExitStack() as stack:
            with files.full_disk_as_failure(folder):
                folder.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(owned(folder))
                is_run = config.is_trained_here and (folder / RECORD).exists()
                if command is not None and is_run and not checkpoint.every(folder):
                    # a finished run that has lost all its weights is made anew
                    restart = restart or load_record(folder).status == "done"
                if restart and folder.exists():
                    moved = _free_name(folder)
                    folder.rename(moved)
                    logger.info("the old run is now in %s", moved)
                folder.mkdir(exist_ok=True)
                files.remove_stale(folder)
                files.remove_stale(folder / "checkpoint")
                existing = _existing(folder, config)
                typed = None
                if command is not None:
                    typed = shlex.join(command)
                run = cls(folder, existing, typed, stack)
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
        finite = json_plain(row)
        line = self._line(finite)
        with files.full_disk_as_failure(self.folder / ROWS):
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
        kept = [row for row in self.rows if step_of(row) <= step]
        if kept != self.rows:
            self._file.close()
            self._write_rows(kept)
            self._open_rows()

    def _line(self, row: Mapping[str, Any]) -> bytes:
        return json.dumps({"run": self.id, **row}, allow_nan=False).encode() + b"\n"

    def _write_rows(self, rows: list[dict[str, Any]]) -> None:
        files.write(self.folder / ROWS, b"".join(map(self._line, rows)))

    def _open_rows(self) -> None:
        """Open the file of rows at its end, without the half line that a kill may leave
        and without lines that are no row of this run: they are made again.
        """
        path = self.folder / ROWS
        self.rows, faults = rows_and_faults(self.folder)
        if faults:
            aside = _free_name(path)
            files.write(aside, path.read_bytes())
            self._write_rows(self.rows)
            logger.warning(
                "%s: left out, with %d such lines in all; the former file is %s",
                faults[0],
                len(faults),
                aside,
            )
        file = open(path, "a+b", buffering=0)  # noqa: SIM115
        self._file = self._stack.enter_context(file)
        self._file.seek(0)
        self._file.truncate(self._file.readall().rfind(b"\n") + 1)

    def update(self, **fields: Any) -> None:
        """Set fields of `run.json`. Those that only another version knows stay."""
        self.record = dataclasses.replace(self.record, **json_plain(fields))
        path = self.folder / RECORD
        written = files.read_json(path) if path.exists() else {}
        text = json.dumps(written | vars(self.record), indent=2)
        files.write(path, text.encode() + b"\n")

    def begin_attempt(self, **resources: Any) -> None:
        """Record that this process starts, and its resources. A run that is done stays
        done while rows are added.
        """
        status = self.record.status
        installed = self.record.installed_encodings
        if self.config.is_trained_here:
            if checkpoint.at(self.folder, self.config.training.steps) is None:
                status = "running"  # it trains, perhaps again
            if not checkpoint.every(self.folder):
                installed = _installed_files(self.config)
        command = self._command or self.record.command
        if status == "done":  # only rows are added
            self.update(reason=ADDING, message=None, command=command)
            return
        attempt = {
            "started": str(datetime.now(UTC)),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            **resources,
        }
        self.update(
            status="running",
            reason=None,
            message=None,
            command=command,
            attempt=attempt,
            versions=versions(),
            installed_encodings=installed,
        )

    def finish(
        self, status: str, reason: str | None = None, message: str | None = None
    ) -> None:
        """Record how the attempt ended and why: `done`, `failed` or `stopped`. A run
        that is done stays done.
        """
        if self.record.status == "done":
            status = "done"
        self.update(status=status, reason=reason, message=message)

    def ended_by(self, error: BaseException) -> None:
        """Record the error that ended the attempt. A run that is done stays as it is if
        no attempt had begun; one that only lacks rows is done.
        """
        message = str(error) or type(error).__name__
        if isinstance(error, RowsFailed):
            self.finish("done", error.reason, message)
            return
        if self.record.status == "done" and self.record.reason != ADDING:
            return
        if isinstance(error, Stopped | KeyboardInterrupt):
            self.finish("stopped", "signal", message)
        elif isinstance(error, RunFailed):
            self.finish("failed", error.reason, message)
        else:
            self.finish("failed", "error", message)

    def record_as_begun(self, config: Config) -> Config:
        """Record and return a configuration. A begun run keeps cadence and evaluation,
        and so the order of its rows.
        """
        if self.rows:
            original = load_config(self.folder)
            runtime = dataclasses.replace(
                config.runtime,
                log_every_steps=original.runtime.log_every_steps,
                validate_every_steps=original.runtime.validate_every_steps,
            )
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
        if self.record.text_sha256 != text_sha256:
            raise self._trained_on_another("text")
        if self.record.tokenizer_sha256 != tokenizer_sha256:
            raise self._trained_on_another("tokenizer")
        for warning in other_code(self.config, self.record):
            logger.warning("%s", warning)

    def _trained_on_another(self, noun: str) -> UserError:
        return UserError(
            f"{self.folder} was trained on another {noun} than its configuration gives"
            " now: restore that text, or train anew with study=NAME, or --restart,"
            " which moves this run aside"
        )


def _free_name(path: Path) -> Path:
    """Return `<path>.old-1`, or the next number that is free."""
    for number in itertools.count(1):
        free = path.with_name(f"{path.name}.old-{number}")
        if not os.path.lexists(free):
            break
    return free


def _existing(folder: Path, config: AnyConfig) -> AnyConfig:
    """Return the configuration that a folder has, or this one if it has none, or
    another than its record says. Raises UserError if it is another run's.
    """
    existing = config
    if (folder / RECORD).exists():
        found = load_record(folder).id
    elif checkpoint.every(folder):
        # they are of a text that nobody knows any more
        raise UserError(f"{folder} has checkpoints, but no {RECORD}; {RESTART}")
    elif (folder / CONFIG).exists():  # killed before it wrote its record
        existing = load_saved(folder / CONFIG)
        found = existing.id
    else:
        return config
    if found != config.id:
        raise UserError(
            f"{folder} holds another run ({found}): choose another folder,"
            " start=RUN to go on from its weights, or --restart to move it aside"
        )
    if not ((folder / RECORD).exists() and (folder / CONFIG).exists()):
        return existing
    try:
        return load_any(folder)
    except UserError as error:
        logger.warning("%s", error)
        (folder / CONFIG).rename(_free_name(folder / CONFIG))
        return config


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
    if not _lock(folder).exists():
        return False
    try:
        with FileLock(_lock(folder), timeout=0):
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


def other_code(config: AnyConfig, record: RunRecord) -> list[str]:
    """Return a line for each encoding from outside of posbench whose source file has
    changed since training began.
    """
    recorded = record.installed_encodings
    if not recorded:
        return []
    lines = []
    for name, digest in _installed_files(config).items():
        if recorded.get(name, digest) != digest:
            lines.append(
                f"'{name}' was trained with another version of its file: old rows are"
                " of that version, --restart trains anew"
            )
    return lines


def _installed_files(config: AnyConfig) -> dict[str, str]:
    """Return the digests of the files that the encoding is from, if not posbench's."""
    encoding = config.encoding
    if encoding.file:
        return {}
    return encodings.installed_files(encoding.name, encoding.options)


def load_config(folder: Path) -> Config:
    """Return the configuration of a run folder. Raises UserError if there is none or it
    is a HuggingFace model's.
    """
    config = load_any(folder)
    if not config.is_trained_here:
        raise UserError(
            f"{folder} holds results of a HuggingFace model, not a run: name the model"
        )
    return config


def evaluated_config(folder: Path, words: list[str]) -> Config:
    """Return a finished run's configuration with words of `posbench evaluate`. Without
    lengths among them it has those of its curve, so that new rows are paired with old
    ones.
    """
    config = load_config(folder)
    settings = config.evaluation
    wanted = ("fixed_target", config.training.steps, settings.split)
    measured = set[float]()
    for row in evaluation_rows(folder):
        found = (row.curve_name, row.checkpoint_step, row.split)
        if found == wanted and row.measured:
            measured.add(row.length_ratio)
    if max(measured, default=0) > max(settings.ratios, default=0):
        settings = dataclasses.replace(settings, ratios=tuple(sorted(measured)))
    return apply(dataclasses.replace(config, evaluation=settings), words)
