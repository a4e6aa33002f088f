"""Write files so that a kill, a crash or a full disk never leaves half of one behind;
read them, and compute their digests.

A file or folder is made under a temporary name beside its place, forced to the disk,
and renamed into place.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posbench.errors import RunFailed, UserError

_TEMPORARY = f".tmp-{'[0-9a-f]' * 16}-*"  # what `temporary` names
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def user_cache() -> Path:
    """Return posbench's folder in the user's cache; it may be missing."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return cache.expanduser() / "posbench"


def temporary(path: Path) -> Path:
    """Return a fresh name beside `path`, of the pattern that `remove_stale` deletes."""
    return path.with_name(f".tmp-{secrets.token_hex(8)}-{path.name}")


def remove_stale(folder: Path) -> None:
    """Remove what killed processes left half-written in a folder that the caller
    owns.
    """
    for path in folder.glob(_TEMPORARY):
        delete(path)


def remove_abandoned(folder: Path) -> None:
    """Remove the folders that killed processes left half-written in one that many may
    write into. A living process holds its own (`atomic_folder`).
    """
    for path in folder.glob(f"{_TEMPORARY}/"):
        with contextlib.suppress(OSError), _opened(path) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            age = time.time() - path.stat().st_mtime
            if age > 1:  # its maker may be about to hold it
                delete(path)


def delete(path: Path) -> None:
    """Remove a file, or a folder with all in it; what cannot be removed stays."""
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.unlink()


def size(folder: Path) -> int:
    """Return the bytes of the files and folders below a folder, also while some of them
    come and go.
    """
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.lstat().st_size
    return total


def sha256(path: Path) -> bytes:
    """Return the digest of a file's bytes, read piece by piece."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def read_json(path: Path, has_nan: bool = False) -> dict[str, Any]:
    """Return the keys and values of a JSON file. Raises UserError if it cannot be read
    or holds something else; see `json_object`.
    """
    try:
        return json_object(path.read_bytes(), has_nan)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"cannot read {path}: {error}") from None


def json_object(text: bytes, has_nan: bool = False) -> dict[str, Any]:
    """Return the keys and values of a JSON object. Raises ValueError for anything else,
    such as NaN unless it may hold that, or a key that stands twice in it.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"the key '{twice}' stands there twice")
        return content

    def constant(name: str) -> float:
        if not has_nan:
            raise ValueError(f"{name} is not JSON")
        return float(name)

    try:
        content = json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError("expected keys in braces")
    return content


def write(path: Path, data: bytes) -> None:
    """Replace a file by `data`, wholly or not at all. Missing folders are made."""
    with _renamed_into(path) as new:
        new.write_bytes(data)
        _flush_to_disk(new)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `path`. At the end it is forced to the disk and
    renamed; an error removes it, and after a kill the next one made beside it does.
    """
    remove_abandoned(path.parent)
    with contextlib.ExitStack() as held, _renamed_into(path) as new:
        new.mkdir()
        descriptor = held.enter_context(_opened(new))
        with contextlib.suppress(OSError):  # not every disk of a network can
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield new
        for file in (*new.iterdir(), new):
            _flush_to_disk(file)


@contextlib.contextmanager
def _renamed_into(path: Path) -> Iterator[Path]:
    new = temporary(path)
    with full_disk_as_failure(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield new
            os.replace(new, path)
        finally:
            delete(new)
        _flush_to_disk(path.parent)


def _flush_to_disk(path: Path) -> None:
    """Force the content of a file, or the names in a folder, to the disk."""
    with _opened(path) as descriptor:
        os.fsync(descriptor)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Yield the descriptor of a file or folder, open for reading."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def full_disk_as_failure(path: Path) -> Iterator[None]:
    """Raise RunFailed with the reason `disk` for the system's "no space"."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise RunFailed(
            f"no room to write {path} ({error.strerror}): free some space and run the"
            " same command again",
            reason="disk",
        ) from error
