"""Full disks, what was forced to one, and child processes, for fault tests.

A full disk is a private, small tmpfs: device nodes such as /dev/full are never touched.
"""

import contextlib
import os
import stat
import subprocess
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A tmpfs of the given size mounted on a folder; skips where this user may not mount."""
    folder.mkdir()
    try:
        mount = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], capture_output=True)
    except FileNotFoundError:
        pytest.skip("no mount command: a full disk cannot be made here")
    if mount.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mount.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@contextlib.contextmanager
def calls_to_the_disk() -> Iterator[list[tuple[str, int, int]]]:
    """What is forced to the disk and what is renamed, in order: each as `call` gives it."""
    calls: list[tuple[str, int, int]] = []

    def renamed(plain: Callable[..., None]) -> Callable[..., None]:
        def rename(old: Any, new: Any) -> None:
            calls.append(call("renamed", os.stat(old)))
            plain(old, new)

        return rename

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: calls.append(call("forced", os.fstat(descriptor))))
        for name in ("rename", "replace"):
            patch.setattr(os, name, renamed(getattr(os, name)))
        yield calls


def call(what: str, facts: os.stat_result) -> tuple[str, int, int]:
    """What was done to which file or folder; of a file also how much of it was there by then."""
    return what, facts.st_ino, 0 if stat.S_ISDIR(facts.st_mode) else facts.st_size


def start_child(work: Callable[[], None]) -> int:
    """Start something in a forked child, whose exit status is 0 if it does not raise; returns its process id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def in_child(work: Callable[[], None]) -> int:
    """Run something in a forked child to its end; returns its exit status, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(start_child(work), 0)[1])
