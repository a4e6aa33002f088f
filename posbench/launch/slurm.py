"""The state of a sweep's jobs in Slurm, by `squeue`, which works without accounting, too."""

import getpass
import math
import subprocess
import time
from pathlib import Path

from posbench.launch.jobs import Status

_EVERY_SECONDS = 5.0  # the controller serves a whole cluster
_LATE_SECONDS = 15.0  # delay with which the last output of a job may appear on a network file system
_CANCELLED = "CANCELLED"
_ENDED = {"COMPLETED", "FAILED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "DEADLINE"}
_ENDED |= {"REVOKED", _CANCELLED}


class Queue:
    """The jobs of one submission by their numbers in its array: each is not there yet, held by Slurm, or ended.

    Args:
        folder: submitit's, which no other submission uses.
        count: how many jobs are submitted.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self._folder = folder
        self._count = count
        self._states: dict[int, str] = {}
        self._ended: dict[int, float] = {}  # since when
        self._next_time = 0.0

    def look(self, now: bool = False) -> None:
        """Ask Slurm, at most every few seconds unless forced. Without an answer the last one holds."""
        if not now and time.monotonic() < self._next_time:
            return
        self._next_time = time.monotonic() + _EVERY_SECONDS
        submitted = bool(self._states) or any(self._folder.glob("*/*_submitted.pkl"))
        found = self._ask()
        if found is None or not (found or submitted):
            return
        for number in range(self._count):
            self._heard(number, found.get(number))

    def has(self, number: int) -> bool:
        """Whether the job waits or runs."""
        return number in self._states and number not in self._ended

    def holds(self, number: int) -> bool:
        """The same, or it ended so recently that its last output may not be visible yet."""
        return self.has(number) or time.monotonic() < self._ended.get(number, -math.inf) + _LATE_SECONDS

    def waits(self, number: int) -> bool:
        """Whether the job is pending, for the first time or requeued."""
        return self._states.get(number) == "PENDING"

    def outcome(self, number: int) -> Status | None:
        """The outcome of a job according to Slurm; None if it has not ended, or only just."""
        if number not in self._ended or self.holds(number):
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

    def _ask(self) -> dict[int, str] | None:
        """States by number; None if Slurm does not answer."""
        command = ["squeue", "--noheader", "--array", "--states=all", f"--user={getpass.getuser()}"]
        try:
            done = subprocess.run([*command, "--format=%K|%T|%o"], capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode != 0:
            return None
        rows = [line.split("|", 2) for line in done.stdout.splitlines()]
        own = [row for row in rows if row[-1].startswith(f"{self._folder}/")]
        return {int(number) if number.isdecimal() else 0: state for number, state, _ in own}  # of one job: N/A
