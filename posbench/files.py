"""Writing files so that a kill, a crash or a full disk never leaves half of one behind; digests.

A file or folder is made under a temporary name beside its place, forced to the disk, and renamed into place.
"""

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from posbench.errors import PosbenchError, RunFailed

_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{16}-.+")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def user_cache() -> Path:
    """posbench's folder in the user's cache; it may be missing. Raises RuntimeError if the user has no home folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "posbench"


def temporary(path: Path) -> Path:
    """A fresh name beside `path`, of the pattern that `remove_stale` knows as ours."""
    return path.with_name(f".tmp-{secrets.token_hex(8)}-{path.name}")


def remove_stale(folder: Path) -> None:
    """Remove what killed processes left half-written in a folder that the caller owns."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if _TEMPORARY.fullmatch(path.name):
            delete(path)


def delete(path: Path) -> None:
    """Remove a file, or a folder with all in it; what cannot be removed stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def size(folder: Path) -> int:
    """Bytes of the files below a folder, also while some of them come and go."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.lstat().st_size
    return total


def write(path: Path, data: bytes) -> None:
    """Replace a file by `data`, wholly or not at all. Permissions follow the umask."""
    new = temporary(path)
    with full_disk_as_failure(path, len(data)):
        try:
            write_new(new, data)
            os.replace(new, path)
        except BaseException:
            delete(new)
            raise
        sync_folder(path.parent)


def write_new(path: Path, data: bytes) -> None:
    """Create a file (it must not exist) and force it to the disk."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sha256(path: Path) -> bytes:
    """Digest of a file's bytes, read piece by piece."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def sync_folder(path: Path) -> None:
    """Force the names in a folder, or the content of a file, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def atomic_folder(path: Path, needed: int | None = None) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; forced to the disk and renamed to it at the end, removed after an error.

    Args:
        needed: bytes, for the message of a full disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = temporary(path)
    with full_disk_as_failure(path, needed):
        try:
            new.mkdir()
            yield new
            for file in new.iterdir():
                sync_folder(file)
            sync_folder(new)
            os.rename(new, path)
            sync_folder(path.parent)
        except BaseException:
            delete(new)
            raise


@contextlib.contextmanager
def full_disk_as_failure(path: Path, needed: int | None = None) -> Iterator[None]:
    """Raise RunFailed with the reason `disk` for the system's "no space"; `needed` is in bytes, None if not known."""
    try:
        yield
    except PosbenchError:
        raise
    except Exception as error:
        full = _no_room(error)
        if full is None:
            raise
        there = next(folder for folder in path.absolute().parents if folder.is_dir())
        need = "" if needed is None else f"{needed:,} bytes needed, "
        raise RunFailed(
            f"no room to write {path} ({full.strerror}): {need}{shutil.disk_usage(there).free:,} free; "
            "free some space and run the same command again",
            reason="disk",
        ) from error


def _no_room(error: BaseException | None) -> OSError | None:
    """The system's "no space" error behind an error; libraries wrap it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            return error
        error = error.__cause__ or error.__context__
    return None
