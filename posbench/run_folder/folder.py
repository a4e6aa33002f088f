"""The run folder: one owner at a time, and records that a kill or a full disk cannot spoil.

`config.yaml` (what was asked), `run.json` (what became of it), `metrics.jsonl`, `evaluation.jsonl` and
`log.txt`. These are the truth; whatever else shows them mirrors them.
"""

import contextlib
import dataclasses
import json
import logging
import os
import shlex
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posbench import encodings, files
from posbench.config import external
from posbench.config.external import AnyConfig, TrainedOn
from posbench.config.identity import NOT_IDENTITY, run_id
from posbench.config.schema import Config, EvaluationConfig, flat, to_container
from posbench.errors import RunFailed, Stopped, UserError
from posbench.run_folder.facts import Where, git_state, now, versions
from posbench.run_folder.jsonl import append, drop_half_line, plain, shortened
from posbench.run_folder.lock import moved_aside, take
from posbench.run_folder.log import LogFile, OneLine, heard_by
from posbench.run_folder.names import CONFIG, EVALUATION, LOCK, LOG_TEXT, METRICS, RECORD
from posbench.run_folder.rows import EvaluationRow

logger = logging.getLogger(__name__)
_SCHEMA = 1  # of run.json and the files beside it


class Run:
    """The owner of a run folder while the `with` block lasts; made by `Run.open`."""

    def __init__(self, folder: Path, config: AnyConfig, id: str, command: list[str] | None, lock: int) -> None:
        self.folder = folder
        self._config = config
        self.id = id
        self._command = None if command is None else shlex.join(command)
        self._held = contextlib.ExitStack()  # until `close`
        self._held.callback(os.close, lock)
        self._began = False  # whether this process began an attempt
        self.record = self._first_record(config)

    @classmethod
    def open(cls, folder: Path, config: AnyConfig, command: list[str] | None, restart: bool = False) -> "Run":
        """Take ownership of a run folder, new or old.

        Args:
            config: what the run is, or a model from elsewhere; written down if the folder is new.
            command: the command line, for the record; None leaves the recorded one.
            restart: move an old folder aside, to `<folder>.old-1`, `-2` ...

        Raises:
            UserError: another process owns the folder, or it holds another run.
        """
        lock = take(folder)
        try:
            if restart and any(path.name != LOCK for path in folder.iterdir()):
                lock = moved_aside(folder, lock)
            files.remove_stale(folder)
            files.remove_stale(folder / "checkpoint")
            id = run_id(_keep_config(folder, config))
            return cls(folder, config, id, command, lock)
        except BaseException:
            os.close(lock)
            raise

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the folder."""
        self._held.close()

    # -- run.json --------------------------------------------------------------------------------------------------

    def update(self, **fields: Any) -> None:
        """Set fields of `run.json`; its schema knows them all."""
        unknown = fields.keys() - self.record.keys()
        if unknown:
            raise ValueError(f"run.json has no {sorted(unknown)}")
        self.record.update(plain(fields))
        files.write(self.folder / RECORD, json.dumps(self.record, indent=2).encode() + b"\n")

    def begin_attempt(self, where: Where, bit_exact: bool = True) -> None:
        """Record that this process starts; `bit_exact`: training goes on as an uninterrupted run would have.

        A run that is done stays done while rows are added, so that a kill takes nothing from it.
        """
        self._began = True
        before = self.record["attempt"] or {}
        if isinstance(self._config, Config) and self.record["status"] != "done":
            _ask_for(self.folder, self._config.evaluation)
        attempt = {
            "started": now(),
            "ended": None,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            **where._asdict(),
            "bit_exact": bit_exact and (before.get("bit_exact", True) or not has_weights(self.folder)),
            "steps": 0,
        }
        self.update(
            status="done" if self.record["status"] == "done" else "running",
            reason=None,
            message=None,
            installed_encodings=self._installed_encodings(),
            command=self._command or self.record["command"],
            attempt=attempt,
            versions=versions(),
            git=git_state(),
        )

    def _installed_encodings(self) -> dict[str, str]:
        if not isinstance(self._config, Config) or has_weights(self.folder):
            return self.record["installed_encodings"]  # type: ignore[no-any-return]
        return encodings.installed_files(self._config.encoding.name, self._config.encoding.options)

    def update_attempt(self, **fields: Any) -> None:
        """Set fields of the current attempt, such as `steps`, the updates it made."""
        self.update(attempt={**self.record["attempt"], **fields})

    def finish(self, status: str, reason: str | None = None, message: str | None = None) -> None:
        """Record how the attempt ended: `done`, `failed` or `stopped`. A run that is done stays done.

        Args:
            reason: why it failed or was stopped. Beside `done`: why a later attempt, to add rows, ended early.
        """
        if self.record["status"] == "done":
            status = "done"
        self.record.update(status=status, reason=reason, message=message)
        if attempt_is_open(self.record):
            self.update_attempt(ended=now())
        else:
            self.update()

    def ended_by(self, error: BaseException) -> None:
        """Record what ended the attempt. If that fails too, warn: what ended it is still the error to report.

        A run that is done and was refused before an attempt began is left as it is.
        """
        if self.record["status"] == "done" and not (self._began and attempt_is_open(self.record)):
            return
        if isinstance(error, (Stopped, KeyboardInterrupt)):
            status, reason, message = "stopped", "signal", str(error) or "interrupted"
        else:
            status, reason, message = "failed", error.reason if isinstance(error, RunFailed) else "error", str(error)
        try:
            self.finish(status, reason, message)
        except (RunFailed, OSError) as failure:
            logger.warning("run.json does not say how the run ended: %s", failure)

    def refuse_other_text(self, sha256: str, tokenizer_sha256: str) -> None:
        """Refuse to resume or evaluate a trained run on another text or with another tokenizer.

        Args:
            sha256: of the corpus that the run's configuration means now.
        """
        if not has_weights(self.folder):
            return
        data = self.record["data"]
        for what, before, here in (
            ("text", data.get("sha256") if data else None, sha256),
            ("tokenizer", self.record["tokenizer_sha256"], tokenizer_sha256),
        ):
            if before not in (None, here):
                raise UserError(
                    f"{self.folder} was trained on another {what} (sha256 {str(before)[:12]}) than its configuration "
                    f"gives now ({here[:12]}): bring that {what} back, or train anew, with study=NAME in another "
                    "study, or with --restart, which moves this run aside"
                )

    def warn_of_other_code(self) -> None:
        """Warn if a trained run's encoding has another source file now."""
        if isinstance(self._config, Config) and has_weights(self.folder):
            for line in other_code(self._config, self.record):
                logger.warning("%s", line)

    def _first_record(self, config: AnyConfig) -> dict[str, Any]:
        path = self.folder / RECORD
        new: dict[str, Any] = {
            "schema": _SCHEMA,
            "id": self.id,
            "study": config.study,
            "encoding": config.encoding.name,
            "seed": config.seed,
            "installed_encodings": {},  # the sha256 of their source files when training began, by name; not of ours
            "status": "running",
            "reason": None,
            "message": None,
            "command": self._command,
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
        if path.exists():
            return {**new, **load_record(self.folder)}
        files.write(path, json.dumps(new, indent=2).encode() + b"\n")
        return new

    # -- the line-by-line records ----------------------------------------------------------------------------------

    def log_metrics(self, row: Mapping[str, Any]) -> None:
        """Append a row to `metrics.jsonl`. What is not finite is null; floats keep seven digits."""
        append(self.folder / METRICS, [shortened(row)])

    def metrics_offset(self) -> int:
        """Length of `metrics.jsonl` in bytes, synced to the disk: a checkpoint saves it."""
        path = self.folder / METRICS
        if not path.exists():
            return 0
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            return file.seek(0, os.SEEK_END)

    def cut_metrics(self, offset: int) -> None:
        """Drop rows logged after a checkpoint, which will be logged again, and half lines."""
        path = self.folder / METRICS
        if path.exists():
            with open(path, "r+b") as file:
                file.truncate(min(offset, file.seek(0, os.SEEK_END)))
                drop_half_line(file)

    def log_evaluation(self, row: EvaluationRow) -> None:
        """Append a row."""
        append(self.folder / EVALUATION, [row.to_json()], durable=True)

    def log_to_file(self) -> None:
        """Copy posbench's log into `log.txt` while the run is owned."""
        log_file = LogFile(self.folder / LOG_TEXT, encoding="utf-8", errors="backslashreplace")
        log_file.setFormatter(OneLine("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._held.enter_context(heard_by(log_file))


# -- reading -----------------------------------------------------------------------------------------------------------


def load_config(folder: Path) -> Config:
    """The configuration of a run folder.

    Raises:
        UserError: there is none, it is not one of posbench, or that of a model which was trained elsewhere.
    """
    config = load_any_config(folder)
    if isinstance(config, TrainedOn):
        raise UserError(f"{folder} holds a HuggingFace model that was trained on: name it, {folder / 'model'}")
    if not isinstance(config, Config):
        source = config.model.source
        raise UserError(f"{folder} holds results of {source}, not a run: 'posbench evaluate {source}' adds to them")
    return config


def load_any_config(folder: Path) -> AnyConfig:
    """The configuration of a run folder, or of a folder with results of a model from elsewhere.

    Raises:
        UserError: there is none, or it is not one of posbench.
    """
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder} is not a run folder: it has no {CONFIG}")
    return external.load_saved(folder / CONFIG)


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


def has_weights(folder: Path) -> bool:
    """Whether a run keeps a checkpoint. Rows that were kept of a run have none."""
    return any((folder / "checkpoint").glob("step-*"))


def held_config(folder: Path, config: AnyConfig) -> AnyConfig | None:
    """The configuration in a folder if it asks for the same weights; None for a new folder.

    Raises:
        UserError: it holds another run.
    """
    if not (folder / CONFIG).exists():
        return None
    held = load_any_config(folder)
    if run_id(held) != run_id(config):
        was, now = flat(to_container(held)), flat(to_container(config))
        changed = [
            key for key in {**was, **now} if was.get(key) != now.get(key) and key.split(".")[0] not in NOT_IDENTITY
        ]
        shown = ", ".join(f"{key} {was.get(key)!r} -> {now.get(key)!r}" for key in changed[:5])
        more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
        goes_on = f"start={folder} training.tokens=N goes on from its weights, " if "training.tokens" in changed else ""
        raise UserError(
            f"{folder} holds another run ({run_id(held)}): {shown}{more}; "
            f"{goes_on}choose another folder, or --restart to move that run aside"
        )
    return held


def _keep_config(folder: Path, config: AnyConfig) -> AnyConfig:
    """The configuration in the folder; this one, written down, if the folder is new."""
    held = held_config(folder, config)
    if held is None:
        _write_config(folder, config)
    return held or config


def _ask_for(folder: Path, evaluation: EvaluationConfig) -> None:
    """Let the configuration of an unfinished run say how it is evaluated when training ends."""
    held = load_config(folder)
    if held.evaluation != evaluation:
        _write_config(folder, dataclasses.replace(held, evaluation=evaluation))


def _write_config(folder: Path, config: AnyConfig) -> None:
    import yaml

    text = yaml.safe_dump(to_container(config), sort_keys=False, allow_unicode=True)
    files.write(folder / CONFIG, text.encode())
