"""The run folder: one owner at a time, and records that a kill, a full disk or a stranger cannot spoil.

`config.yaml` (what was asked), `run.json` (what became of it), `metrics.jsonl`, `evaluation.jsonl`,
`evaluation_blocks.jsonl` and `log.txt`. These are the truth; whatever else shows them mirrors them.
"""

import contextlib
import datetime
import errno
import fcntl
import importlib.metadata
import json
import logging
import math
import os
import platform
import shlex
import socket
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import posbench
from posbench import config as configuration
from posbench import files
from posbench.config import NOT_IDENTITY, Config
from posbench.errors import InUse, UserError
from posbench.redaction import redact, secret_keys

_LOG = logging.getLogger(__name__)
_SCHEMA = 1
_CONFIG, _RECORD, _LOCK, _LOGFILE = "config.yaml", "run.json", ".lock", "log.txt"
_METRICS, _EVALUATION, _BLOCKS = "metrics.jsonl", "evaluation.jsonl", "evaluation_blocks.jsonl"
_OWN = (_CONFIG, _RECORD, _LOCK, _LOGFILE, _METRICS, _EVALUATION, _BLOCKS)
_RECORDED_VERSIONS = ("torch", "numpy", "safetensors", "tokenizers", "datasets", "hydra-core", "pydantic", "wandb")

EVALUATION_KEY = ("protocol", "length", "stride", "window", "extension", "task", "split", "checkpoint_step")


class Run:
    """The owner of a run folder while the `with` block lasts; made by `Run.open`."""

    def __init__(self, folder: Path, config: Config, command: list[str] | None, lock: int) -> None:
        self.folder = folder
        self.id = configuration.run_id(config)
        self._command = None if command is None else redact(shlex.join(command))
        self._lock = lock
        self._log_file: logging.FileHandler | None = None
        self.record = self._first_record(config)

    @classmethod
    def open(cls, folder: Path, config: Config, command: list[str] | None, restart: bool = False) -> "Run":
        """Take ownership of a run folder, new or old.

        Args:
            config: what the run is; written down if the folder is new.
            command: the command line, for the record; None leaves the recorded one.
            restart: move an old folder aside, to `<folder>.old-1`, `-2` ...

        Raises:
            UserError: another process owns the folder, it holds another run, or the configuration holds a secret.
        """
        refuse_secrets(config)
        lock = _lock(folder)
        try:
            if restart and any(path.name != _LOCK for path in folder.iterdir()):
                lock = _moved_aside(folder, lock)
            _refuse_links(folder)
            files.remove_stale(folder)
            files.remove_stale(folder / "checkpoint")
            _keep_config(folder, config)
            return cls(folder, config, command, lock)
        except BaseException:
            os.close(lock)
            raise

    def __enter__(self) -> "Run":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the folder up."""
        if self._log_file:
            logging.getLogger("posbench").removeHandler(self._log_file)
            self._log_file.close()
            self._log_file = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # -- run.json --------------------------------------------------------------------------------------------------

    def update(self, **fields: Any) -> None:
        """Set fields of `run.json`; its schema knows them all."""
        unknown = fields.keys() - self.record.keys()
        if unknown:
            raise ValueError(f"run.json has no {sorted(unknown)}")
        self.record.update(_plain(fields))
        files.write(self.folder / _RECORD, json.dumps(self.record, indent=2).encode() + b"\n")

    def begin_attempt(self, device: str, dtype: str, threads: int) -> None:
        """Record that this process starts to work on the run."""
        attempt = {
            "started": _now(),
            "ended": None,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "device": device,
            "dtype": dtype,
            "threads": threads,
            "steps": 0,
        }
        self.update(
            status="running",
            reason=None,
            message=None,
            command=self._command or self.record["command"],
            attempts=[*self.record["attempts"], attempt],
            versions=_versions(),
            git=_git(),
        )

    def update_attempt(self, **fields: Any) -> None:
        """Set fields of the current attempt, such as `steps`, the updates it made."""
        *before, current = self.record["attempts"]
        unknown = fields.keys() - current.keys()
        if unknown:
            raise ValueError(f"an attempt has no {sorted(unknown)}")
        self.update(attempts=[*before, {**current, **fields}])

    def finish(self, status: str, reason: str | None = None, message: str | None = None) -> None:
        """Record how the attempt ended: status `done`, `failed` or `stopped`."""
        self.record.update(status=status, reason=reason, message=None if message is None else redact(message))
        if self.record["attempts"]:
            self.update_attempt(ended=_now())
        else:
            self.update()

    def _first_record(self, config: Config) -> dict[str, Any]:
        path = self.folder / _RECORD
        new: dict[str, Any] = {
            "schema": _SCHEMA,
            "id": self.id,
            "study": config.study,
            "encoding": config.encoding.name,
            "seed": config.seed,
            "status": "running",
            "reason": None,
            "message": None,
            "command": self._command,
            "attempts": [],
            "parameters": {"total": None, "encoding": None, "non_embedding": None},
            **dict.fromkeys(("tokens", "train_seconds", "cpu_seconds", "evaluate_seconds", "peak_memory_bytes")),
            "data": None,
            "tokenizer_sha256": None,
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
        _append(self.folder / _METRICS, [{key: _rounded(value) for key, value in _plain(row).items()}])

    def metrics_offset(self) -> int:
        """Length of `metrics.jsonl` in bytes, all of them on the disk: what a checkpoint remembers."""
        path = self.folder / _METRICS
        if not path.exists():
            return 0
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            return file.seek(0, os.SEEK_END)

    def cut_metrics(self, offset: int) -> None:
        """Drop what was logged after a checkpoint, since it will be logged again; half lines go too."""
        path = self.folder / _METRICS
        if not path.exists():
            return
        with open(path, "r+b") as file:
            file.truncate(min(offset, file.seek(0, os.SEEK_END)))
            _drop_half_line(file)

    def log_evaluation(self, row: Mapping[str, Any], blocks: Iterable[Mapping[str, Any]]) -> None:
        """Append an evaluation cell: first its blocks, then its row, so that a row vouches for its blocks.

        Args:
            row: a whole row of `evaluation.jsonl`.
            blocks: `nll_sum`, `n_tokens`, `n_bytes` of each block, in order.
        """
        key = {name: row.get(name) for name in (*EVALUATION_KEY, "targets_sha256")}
        numbered = [{**key, "block": number, **block} for number, block in enumerate(blocks)]
        _append(self.folder / _BLOCKS, numbered, durable=True)
        _append(self.folder / _EVALUATION, [row], durable=True)

    def log_to_file(self) -> None:
        """Copy what posbench logs into `log.txt` while the run is owned."""
        self._log_file = _LogFile(self.folder / _LOGFILE, encoding="utf-8", errors="backslashreplace")
        self._log_file.setFormatter(_OneLine("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger = logging.getLogger("posbench")
        logger.addHandler(self._log_file)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)


# -- reading, also folders of strangers --------------------------------------------------------------------------------


def load_config(folder: Path) -> Config:
    """The configuration of a run folder.

    Raises:
        UserError: there is none, or it is not one of posbench.
    """
    if not (folder / _CONFIG).is_file():
        raise UserError(f"{folder} is not a run folder: it has no {_CONFIG}")
    return configuration.load(folder / _CONFIG)


def load_record(folder: Path) -> dict[str, Any]:
    """The `run.json` of a run folder.

    Raises:
        UserError: it cannot be read.
    """
    path = folder / _RECORD
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {error}; --restart starts over") from None
    if not isinstance(record, dict):
        raise UserError(f"{path} is not a run's record: expected an object; --restart starts over")
    return record


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, none if there is no file. A last line cut short is passed over.

    Raises:
        UserError: a whole line is not a JSON object.
    """
    if not path.is_file():
        return []
    *lines, _ = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise UserError(f"line {number} of {path} is not a JSON object")
        rows.append(row)
    return rows


def evaluation_rows(folder: Path) -> list[dict[str, Any]]:
    """Rows of `evaluation.jsonl`, the last of each key."""
    rows = read_jsonl(folder / _EVALUATION)
    return list({_key(row): row for row in rows}.values())


def evaluation_blocks(folder: Path) -> list[dict[str, Any]]:
    """Lines of `evaluation_blocks.jsonl`, the last set of each key."""
    sets: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in read_jsonl(folder / _BLOCKS):
        if line.get("block") == 0:
            sets[_key(line)] = []
        sets.setdefault(_key(line), []).append(line)
    return [line for lines in sets.values() for line in lines]


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(json.dumps(row.get(name)) for name in EVALUATION_KEY)


def refuse_secrets(config: Config) -> None:
    """What a configuration holds is written down and shown.

    Raises:
        UserError: a value looks like a secret.
    """
    for key in secret_keys(configuration.to_container(config)):
        raise UserError(f"{key} looks like it holds a secret: give secrets by environment variable or ~/.netrc")


def in_use(folder: Path) -> bool:
    """Whether a process owns the run folder at this moment."""
    try:
        with open(folder / _LOCK, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no folder yet, or a file system without locks
        return False
    return False


# -- ownership ---------------------------------------------------------------------------------------------------------


def _lock(folder: Path) -> int:
    """Own a folder, created if missing: the descriptor of its locked `.lock`. The system frees a dead owner's lock."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / _LOCK
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:  # moved aside this moment
            continue
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise UserError(f"{path} is a symbolic link: refused") from None
            raise
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 4096, 0)
            os.close(descriptor)
            raise InUse(_owned(folder, owner)) from None
        except OSError as error:  # some network file systems have no locks
            _LOG.warning("%s cannot be locked (%s): make sure that no other process uses it", folder, error.strerror)
        if _is_still(path, descriptor):
            break
        os.close(descriptor)  # an owner moved the folder aside between opening and locking
    owner = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "started": _now()}).encode()
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, owner, 0)
    return descriptor


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _owned(folder: Path, content: bytes) -> str:
    try:
        owner = json.loads(content)
        started = datetime.datetime.fromisoformat(owner["started"])
        seconds = max(0, round((datetime.datetime.now(datetime.UTC) - started).total_seconds()))
        who = (
            f"process {int(owner['pid'])} on {str(owner['host'])!r}, started {datetime.timedelta(seconds=seconds)} ago"
        )
    except (ValueError, KeyError, TypeError):  # it has the lock and has not yet said who it is
        who = "another process, started just now"
    return f"{folder} is in use by {who}: wait for it or stop it"


def _moved_aside(folder: Path, lock: int) -> int:
    """Rename an owned folder to the next free `.old-N` and own a new, empty one in its place."""
    number = 1
    while os.path.lexists(aside := folder.with_name(f"{folder.name}.old-{number}")):
        number += 1
    os.rename(folder, aside)
    _LOG.info("the old run is now in %s", aside)
    new = _lock(folder)
    os.close(lock)
    return new


def _refuse_links(folder: Path) -> None:
    """A folder from a stranger must not make us write elsewhere."""
    for name in _OWN:
        if (folder / name).is_symlink():
            raise UserError(f"{folder / name} is a symbolic link: refused")


def _keep_config(folder: Path, config: Config) -> None:
    import yaml

    asked = configuration.to_container(config)
    path = folder / _CONFIG
    if not path.exists():
        files.write(path, yaml.safe_dump(asked, sort_keys=False, allow_unicode=True).encode())
        return
    held = load_config(folder)
    if configuration.run_id(held) != configuration.run_id(config):
        was, now = _flat(configuration.to_container(held)), _flat(asked)
        changed = [
            key for key in {**was, **now} if was.get(key) != now.get(key) and key.split(".")[0] not in NOT_IDENTITY
        ]
        shown = ", ".join(f"{key} {was.get(key)!r} -> {now.get(key)!r}" for key in changed[:5])
        more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
        raise UserError(
            f"{folder} holds another run ({configuration.run_id(held)}): {shown}{more}; "
            "choose another folder, or --restart to move that run aside"
        )


def _flat(container: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in container.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


# -- writing lines -----------------------------------------------------------------------------------------------------


def _append(path: Path, rows: Iterable[Mapping[str, Any]], durable: bool = False) -> None:
    """Append JSON lines: all of them, or none and an error. A half line from before is dropped first."""
    data = "".join(json.dumps(_plain(row), allow_nan=False) + "\n" for row in rows).encode()
    with files.full_disk_as_failure(path, len(data)), open(path, "a+b", buffering=0) as file:
        end = _drop_half_line(file)
        try:
            while data:
                data = data[file.write(data) :]
            if durable:
                os.fsync(file.fileno())
        except OSError:
            os.ftruncate(file.fileno(), end)
            raise


def _drop_half_line(file: Any) -> int:
    """Truncate an open file after its last newline; returns where that is, in bytes."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - 65536)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    file.truncate(end)
    file.seek(end)
    return int(end)


def _plain(value: Any) -> Any:
    """Plain JSON types; tensors and numpy numbers become numbers, what is not finite becomes None."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):
        return _plain(value.item())
    raise TypeError(f"{value!r} is not a plain value")


def _rounded(value: Any) -> Any:
    return float(f"{value:.7g}") if isinstance(value, float) else value


class _OneLine(logging.Formatter):
    """One line per record in UTC: a newline in a name cannot forge a line, and secrets stay out."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return _iso(record.created)

    def format(self, record: logging.LogRecord) -> str:
        text = redact(super().format(record))
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Stay silent: a full disk ends the run by the records that matter, not by a traceback per line here."""


# -- facts about this process ------------------------------------------------------------------------------------------


def _now() -> str:
    return _iso(datetime.datetime.now(datetime.UTC).timestamp())


def _iso(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds")


def _versions() -> dict[str, str]:
    """Name and version only: an installer's log may hold addresses with passwords."""
    versions = {"posbench": posbench.__version__, "python": platform.python_version()}
    for name in _RECORDED_VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _git() -> dict[str, Any]:
    """Commit of the checkout that posbench runs from, and whether its code was changed; nulls if it is installed."""
    root = Path(__file__).resolve().parent.parent
    try:
        if Path(_git_says(root, "rev-parse", "--show-toplevel")).resolve() == root:
            commit = _git_says(root, "rev-parse", "HEAD")
            changes = _git_says(root, "status", "--porcelain", "--", "posbench", "configs")
            return {"commit": commit, "dirty": bool(changes)}
    except (OSError, subprocess.SubprocessError, ValueError):
        pass
    return {"commit": None, "dirty": None}


def _git_says(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-c", "core.fsmonitor=false", "-C", str(root), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
        timeout=5,
        env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
    ).stdout.strip()
