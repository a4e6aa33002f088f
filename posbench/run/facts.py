"""Facts about this process that a run records: times, versions, the commit."""

import contextlib
import datetime
import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import posbench

_RECORDED_VERSIONS = (
    "torch",
    "numpy",
    "safetensors",
    "tokenizers",
    "datasets",
    "hydra-core",
    "pydantic",
    "wandb",
    "transformers",
)


class Where(NamedTuple):
    """What an attempt computes on and with."""

    device: str
    dtype: str
    threads: int  # of the CPU, in each process
    processes: int = 1  # that train together
    compiled: bool = False  # whether the compiler fuses what lies between attention layers


def now() -> str:
    return iso(datetime.datetime.now(datetime.UTC).timestamp())


def iso(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds")


def versions() -> dict[str, str]:
    """Name and version only: an installer's log may hold addresses with passwords."""
    versions = {"posbench": posbench.__version__, "python": platform.python_version()}
    for name in _RECORDED_VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def git_state() -> dict[str, Any]:
    """Commit of the checkout that posbench runs from, and whether its code was changed; nulls if it is installed."""
    root = Path(posbench.__file__).resolve().parent.parent
    if (root / ".git").exists():
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            changes = _git_says(root, "status", "--porcelain", "--", "posbench", "configs")
            return {"commit": _git_says(root, "rev-parse", "HEAD"), "dirty": bool(changes)}
    return {"commit": None, "dirty": None}


def _git_says(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
