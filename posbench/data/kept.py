"""What is kept on the disk between runs: folders that are whole or absent, and digests of files that have not changed.

A folder is made aside, renamed into place when it is whole, and verified before use: its `meta.json` has the sha256 of
each file, and a record.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from posbench import files
from posbench.errors import PosbenchError, UserError

logger = logging.getLogger(__name__)

META, SEEN = "meta.json", "seen.json"
NOT_WHOLE = (OSError, ValueError, KeyError, TypeError, AttributeError, UserError)  # what `opened` raises
_LARGEST_META, _LARGEST_NOTE = 2**20, 2**27  # bytes; a note has a line for each of half a million files
_SETTLED_NS = 2 * 10**9  # the coarsest clock of a file system: a later write has another time
_SHA256 = re.compile(r"[0-9a-f]{64}")
_Kept = TypeVar("_Kept")


class Digests:
    """The sha256 of files. A note remembers them, so that gigabytes are not read again at each start.

    A file counts as unchanged if its size, inode, time of change and time of status change (which every write sets, and
    no program can) are those of the note. One that was written within the last two seconds is not remembered.
    """

    def __init__(self, note: Path) -> None:
        self._note = note
        self._known: Any = {}
        self._now: dict[str, list[Any]] = {}
        with contextlib.suppress(OSError, ValueError, UserError):
            self._known = json.loads(files.read(note, _LARGEST_NOTE))

    def of(self, path: Path) -> bytes:
        """The digest of a file's bytes. Raises OSError if it cannot be read."""
        found, began = path.stat(), time.time_ns()
        facts = [found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns]
        known = self._known.get(str(path)) if isinstance(self._known, dict) else None
        match known:
            case [*seen, str(digest)] if seen == facts and _SHA256.fullmatch(digest):
                self._now[str(path)] = known
                return bytes.fromhex(digest)
        made = files.sha256(path)
        if began - max(found.st_mtime_ns, found.st_ctime_ns) > _SETTLED_NS:
            self._now[str(path)] = [*facts, made.hex()]
        return made

    def keep(self) -> None:
        """Write the note, if it can be written."""
        if self._now and self._now != self._known:
            with contextlib.suppress(OSError, PosbenchError):
                self._note.parent.mkdir(parents=True, exist_ok=True)
                files.write(self._note, json.dumps(self._now).encode())


def remembered(notes: Path, about: str) -> Digests:
    """The digests of the files of a folder or glob; `notes` is the folder of all such notes."""
    return Digests(notes / f"{hashlib.sha256(os.fsencode(os.path.abspath(about))).hexdigest()[:16]}.json")


def folder(place: Path, make: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """The record of a kept folder, which is made now if it is not there or not what was written.

    Args:
        place: where it is or will be; the caller holds a lock, so that one process at a time comes here.
        make: writes the files into an empty folder and returns the record.
    """
    if (there := whole(place, opened)) is not None:
        return there
    for stale in place.parent.glob(f"{place.name}.*.tmp"):  # of a process that was killed
        files.delete(stale)
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{place.name}.", suffix=".tmp", dir=place.parent) as aside:
        made = Path(aside) / "made"
        made.mkdir()
        record = make(made)
        seal(made, place, record)
    return record


def whole(place: Path, read: Callable[[Path], _Kept]) -> _Kept | None:
    """What `read` returns of a kept folder; None if there is none. A damaged one is deleted.

    Args:
        read: raises one of `NOT_WHOLE` for what is not what was written, as `opened` does.
    """
    if not os.path.lexists(place):
        return None
    try:
        return read(place)
    except NOT_WHOLE as error:
        logger.warning("%s is damaged (%s): making it again", place, error)
        files.delete(place)
        return None


def seal(made: Path, place: Path, record: dict[str, Any]) -> None:
    """Write the digests of a folder's files and the record into it, and rename it into place."""
    digests = {path.name: files.sha256(path).hex() for path in sorted(made.iterdir()) if path.name != META}
    (made / META).write_text(json.dumps({"record": record, "files": digests}, indent=1), encoding="utf-8")
    os.replace(made, place)


def opened(place: Path) -> dict[str, Any]:
    """The record of a kept folder, after checking every file against its digest.

    Raises:
        NOT_WHOLE: a file is missing, is a link, or is not what was written.
    """
    for path in (place, *place.iterdir()):
        files.refuse_unusual(path)
    meta = json.loads(files.read(place / META, _LARGEST_META))
    digests = Digests(place / SEEN)
    for file, digest in meta["files"].items():
        if Path(file).name != file or digests.of(place / file).hex() != digest:
            raise ValueError(f"{file} is not what was written")
    digests.keep()
    record: dict[str, Any] = meta["record"]
    return record


@contextlib.contextmanager
def locked(place: Path) -> Iterator[None]:
    """Let one process at a time make what is kept at a place; the lock goes with the process."""
    with files.full_disk_as_failure(place):
        place.parent.mkdir(parents=True, exist_ok=True)
    descriptor = files.lock(place.with_name(f"{place.name}.lock"), wait=True)
    try:
        yield
    finally:
        os.close(descriptor)
