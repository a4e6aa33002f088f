"""Full disks and child processes, for fault tests.

A full disk is a private, small tmpfs: device nodes such as /dev/full are never touched.
"""

import contextlib
import os
import subprocess
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A tmpfs of the given size mounted on a folder; skips where this user may not mount."""
    folder.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], capture_output=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a tmpfs cannot be mounted here: {error}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


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
