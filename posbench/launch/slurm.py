"""The states of jobs in Slurm, by `squeue`, which also works without accounting."""

import getpass
import math
import subprocess
import time
from pathlib import Path

from posbench.launch.states import Status

_EVERY_SECONDS = 5.0  # the controller serves a whole cluster
_LATE_SECONDS = 15.0  # delay with which the last output of a job may appear on a network file system
_CANCELLED = "CANCELLED"
_ENDED = {"COMPLETED", "FAILED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "DEADLINE"}
_ENDED |= {"REVOKED", _CANCELLED}


class Queue:
    """Jobs that were submitted together, by their numbers from 0: each is held by Slurm, or has ended.

    Args:
        ids: Slurm's names of the jobs, such as 12_0.
        folder: where the jobs print.
    """

    def __init__(self, ids: list[str], folder: Path) -> None:
        self._ids = ids
        self._folder = folder
        self._states: dict[int, str] = {}
        self._ended: dict[int, float] = {}  # since when
        self._next_time = 0.0

    def look(self) -> None:
        """Ask Slurm, at most every few seconds. Without an answer the last one holds."""
        if time.monotonic() < self._next_time:
            return
        self._next_time = time.monotonic() + _EVERY_SECONDS
        if (found := self._ask()) is not None:
            for number, name in enumerate(self._ids):
                self._heard(number, found.get(name))

    def has(self, number: int) -> bool:
        """Whether the job waits or runs."""
        return number in self._states and number not in self._ended

    def waits(self, number: int) -> bool:
        """Whether the job is pending, for the first time or requeued."""
        return self._states.get(number) == "PENDING"

    def outcome(self, number: int) -> Status | None:
        """The outcome of a job according to Slurm; None if it has not ended, or its last output may still come."""
        if time.monotonic() < self._ended.get(number, math.inf) + _LATE_SECONDS:
            return None
        state = self._states[number]
        if state == _CANCELLED:
            return Status("stopped", "signal", "cancelled in Slurm")
        reason = "oom" if state == "OUT_OF_MEMORY" else "error"
        return Status("failed", reason, f"Slurm says {state}; what the job printed is below {self._folder}")

    def _heard(self, number: int, state: str | None) -> None:
        """Note a state. Slurm forgets ended jobs after minutes, and jobs cancelled before they began at once."""
        if state is not None or number not in self._ended:
            self._states[number] = state or _CANCELLED
        if self._states[number] in _ENDED:
            self._ended.setdefault(number, time.monotonic())
        else:  # it may have been requeued
            self._ended.pop(number, None)

    def end(self) -> None:
        """Jobs go on without the sweep."""

    def _ask(self) -> dict[str, str] | None:
        """States of this user's jobs; None if Slurm does not answer."""
        command = ["squeue", "--noheader", "--array", "--states=all", f"--user={getpass.getuser()}"]
        try:
            done = subprocess.run([*command, "--format=%i %T"], capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode != 0:
            return None
        return dict(line.split() for line in done.stdout.splitlines())
