"""The lock of a run folder: one process at a time owns it. The system frees the lock when its holder dies."""

import errno
import fcntl
import logging
import os
import socket
from pathlib import Path

from posbench import files
from posbench.errors import InUse
from posbench.run_folder.facts import now
from posbench.run_folder.names import LOCK

logger = logging.getLogger(__name__)


def in_use(folder: Path, without_locks: bool = False) -> bool:
    """Whether a process owns the run folder at this moment; `without_locks` where locks do not work."""
    try:
        with (folder / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, FileNotFoundError) as error:  # no file: no folder yet, or a copy
        return isinstance(error, BlockingIOError)
    except OSError:
        return without_locks
    return False


def died(folder: Path) -> bool:
    """Whether a run whose record says `running` has lost its owner; False if locks do not work here."""
    return not in_use(folder, without_locks=True)


def take(folder: Path) -> int:
    """Own a folder, created if missing: the descriptor of its locked `.lock`. The system frees a dead owner's lock.

    Raises:
        InUse: another process owns it.
        PermissionError: it cannot be written to, such as another user's.
    """
    while True:
        with files.full_disk_as_failure(folder):
            folder.mkdir(parents=True, exist_ok=True)
        path = folder / LOCK
        try:
            descriptor = files.lock(path)
        except FileNotFoundError:  # moved aside this moment
            continue
        except BlockingIOError:
            who = path.read_text(encoding="utf-8") or "another process"
            raise InUse(f"{folder} is in use by {who}: wait for it or stop it") from None
        if _is_still(path, descriptor):
            break
        os.close(descriptor)  # an owner moved the folder aside between opening and locking
    if not os.access(folder, os.W_OK):
        os.close(descriptor)
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:  # another user's lock in a shared folder
        return descriptor
    owner = f"process {os.getpid()} on {socket.gethostname()}, since {now()}".encode()
    with files.full_disk_as_failure(path, len(owner)):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, owner, 0)
    return descriptor


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def moved_aside(folder: Path, lock: int) -> int:
    """Rename an owned folder to the next free `.old-N` and own a new, empty one in its place."""
    number = 1
    while os.path.lexists(aside := folder.with_name(f"{folder.name}.old-{number}")):
        number += 1
    os.rename(folder, aside)
    logger.info("the old run is now in %s", aside)
    new = take(folder)
    os.close(lock)
    return new
