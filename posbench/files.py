"""Writing files so that a kill, a crash or a full disk never leaves half of one behind; locks, digests.

A file or folder is made under a temporary name beside its place, forced to the disk, and renamed into place.
"""

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from posbench.errors import RunFailed

logger = logging.getLogger(__name__)

_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{16}-.+")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def temporary(path: Path) -> Path:
    """A fresh name beside `path`, of the pattern that `remove_stale` knows as ours."""
    return path.with_name(f".tmp-{secrets.token_hex(8)}-{path.name}")


def remove_stale(folder: Path) -> None:
    """Remove what killed processes left half-written in a folder that the caller owns. Links are left alone."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if _TEMPORARY.fullmatch(path.name) and not path.is_symlink():
            delete(path)


def delete(path: Path) -> None:
    """Remove a file, or a folder with all in it; what cannot be removed stays."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


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


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock(path: Path, wait: bool = False) -> int:
    """Lock a file, made if missing: the descriptor that holds the lock until it is closed or the process ends.

    Some network file systems have no locks: there a warning is logged, and the descriptor holds nothing.

    Raises:
        BlockingIOError: another process holds it, and this one shall not wait for it.
        OSError: it cannot be opened; a symbolic link is not followed.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError as error:
        logger.warning("%s cannot be locked (%s): make sure that no other process uses it", path.parent, error.strerror)
    return descriptor


@contextlib.contextmanager
def full_disk_as_failure(path: Path, needed: int) -> Iterator[None]:
    """Turn the system's "no space" into the one line that a run ends with.

    Raises:
        RunFailed: reason `disk`, naming the path, the bytes needed and the bytes free.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        free = shutil.disk_usage(path.parent).free
        raise RunFailed(
            f"no room to write {path} ({error.strerror}): {needed:,} bytes needed, {free:,} free; "
            "free some space and run the same command again",
            reason="disk",
        ) from error
