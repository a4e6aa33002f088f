"""The lock of a run folder: one process at a time owns it. The system frees the lock when its holder dies."""

import datetime
import errno
import fcntl
import json
import logging
import os
import socket
from pathlib import Path

from posbench import files
from posbench.errors import InUse
from posbench.run_folder.facts import now
from posbench.run_folder.names import LOCK

logger = logging.getLogger(__name__)
_OWNER_BYTES = 4096  # an owner says less about itself


def in_use(folder: Path, without_locks: bool = False) -> bool:
    """Whether a process owns the run folder at this moment; `without_locks` where locks do not work."""
    try:
        with files.open_itself(folder / LOCK) as file:
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
            raise InUse(_owned(folder, path)) from None
        if _is_still(path, descriptor):
            break
        os.close(descriptor)  # an owner moved the folder aside between opening and locking
    if not os.access(folder, os.W_OK):
        os.close(descriptor)
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:  # another user's lock in a shared folder
        return descriptor
    owner = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "started": now()}).encode()
    with files.full_disk_as_failure(path, len(owner)):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, owner, 0)
    return descriptor


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _owned(folder: Path, lock: Path) -> str:
    try:
        with files.open_itself(lock) as file:
            owner = json.loads(file.read(_OWNER_BYTES))
        started = datetime.datetime.fromisoformat(owner["started"])
        seconds = max(0, round((datetime.datetime.now(datetime.UTC) - started).total_seconds()))
        who = (
            f"process {int(owner['pid'])} on {str(owner['host'])!r}, started {datetime.timedelta(seconds=seconds)} ago"
        )
    except (OSError, ValueError, KeyError, TypeError):  # it has the lock and has not yet said who it is
        who = "another process, started just now"
    return f"{folder} is in use by {who}: wait for it or stop it"


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
