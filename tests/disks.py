"""Full disks, for fault tests: a private, small tmpfs; device nodes such as /dev/full are never touched."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import in_child as in_child


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
