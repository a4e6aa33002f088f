"""Bounds on what a file may unpack to, so that a small file fills neither memory nor disk.

| what | at most | why |
|---|---|---|
| a document: a file of prose, a line, a cell of a table | 1/16 of the memory | it is held whole, several times over |
| a line of `.jsonl`, a `.json` file | 1/64 of the memory | a value of two bytes becomes an object of a hundred |
| the text of one file | 200 times its size, or 64 MiB | prose packs to a third, logs to a hundredth |
| the text, all splits | 1/2 of what is free on the disk, or 1 GiB | it is written there while it is tokenised |

The memory is what `machine.memory_limit` says, so `POSBENCH_MEMORY_GIB` raises the first two.
"""

import shutil
from pathlib import Path

from posbench import machine
from posbench.errors import UserError

DOCUMENT_SHARE, JSON_SHARE = 16, 64
TIMES_ITS_SIZE, SMALL = 200, 64 * 2**20
DISK_SHARE, LITTLE = 2, 2**30  # bytes; a disk with less free reports by itself that it is full
_USUAL_MEMORY = 8 * 2**30  # where the machine does not say


def _of_memory(share: int) -> tuple[int, str]:
    memory, says = machine.memory_limit("cpu") or (_USUAL_MEMORY, "memory usual of a machine")
    return memory // share, f"1/{share} of the {says}; {machine.MEMORY}=GIB sets another"


def document() -> tuple[int, str]:
    """Bytes of the largest document, and which limit that is."""
    return _of_memory(DOCUMENT_SHARE)


def json_text() -> tuple[int, str]:
    """Bytes of the largest JSON text, and which limit that is."""
    return _of_memory(JSON_SHARE)


def too_large(what: str, limit: tuple[int, str], instead: str = "a document per row of a .jsonl file") -> UserError:
    """The message for data beyond a limit of memory."""
    return UserError(f"{what} has more than {limit[0]:,} bytes ({limit[1]}): expected {instead}")


class Count:
    """Counts bytes of text; those beyond the limit raise UserError with these words."""

    def __init__(self, limit: int, told: str) -> None:
        self.limit, self.told, self.so_far = limit, told, 0

    def add(self, size: int) -> None:
        self.so_far += size
        if self.so_far > self.limit:
            raise UserError(self.told)


def unpacked(file: Path) -> Count:
    """A count of the bytes of text that one file unpacks to."""
    limit = max(SMALL, TIMES_ITS_SIZE * file.stat().st_size)
    return Count(
        limit,
        f"'{file}' holds more than {limit:,} bytes of text, {TIMES_ITS_SIZE} times its size: refused, as no text packs "
        "so well; if it is meant, unpack it and give it as .txt or .jsonl",
    )


def written(folder: Path) -> Count:
    """A count of the bytes of text written to a folder's disk."""
    limit = max(LITTLE, shutil.disk_usage(folder).free // DISK_SHARE)
    return Count(
        limit,
        f"the text has more than {limit:,} bytes, half of what was free in {folder}: free some space, choose another "
        "disk with runtime.cache=FOLDER, or read less with data.max_documents=N",
    )
