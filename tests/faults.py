"""Runs in processes of their own, forked from this one so that torch is imported once, for faults to be done to.

A case is a tiny run that was trained and evaluated without a fault, `outcome` all that two such runs must agree in,
and `faults_of` what a kill must never leave behind. A process that is killed loses what it had in memory and nothing
that it gave to the system: what a power failure takes with it is not tried here.
"""

import builtins
import dataclasses
import errno
import hashlib
import io
import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from disks import start_child
from support import write_words

from posbench.config.schema import Config
from posbench.errors import PosbenchError
from posbench.launch import run as launch
from posbench.launch.plans import Plan
from posbench.run import checkpoint
from posbench.run.rows import evaluation_rows, read_rows, training_rows
from posbench.run.run import load_config, load_record
from posbench.terminal import exits

_OF_TIME = {"seconds", "train/tokens_per_second", "peak_memory_bytes"}
_OF_RECORD = ("status", "reason", "tokens", "parameters", "data", "tokenizer_sha256")
_CALLS = ("open", "fsync", "rename", "replace", "mkdir", "unlink", "remove", "rmdir", "ftruncate", "pwrite", "write")
Work = Callable[[], object]


# -- a run, and what it comes to ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A configuration, and what it comes to without a fault."""

    config: Config
    folder: Path  # of the run without a fault
    seconds: dict[str, float]  # that each command takes in a process of its own

    @classmethod
    def make(cls, config: Config, place: Path, **changes: dict[str, Any]) -> "Case":
        """Run a configuration with changes to its parts, on a text of random words, in a folder of that name."""
        write_words(place)
        changes["data"] = {"path": str(place / "text.txt")}
        changes["runtime"] = {"cache": str(place / "cache")} | changes.get("runtime", {})
        parts = {name: dataclasses.replace(getattr(config, name), **values) for name, values in changes.items()}
        config, seconds = dataclasses.replace(config, **parts), {}
        for name in ("first", "whole"):  # the first of them imports what the others find
            for command, work in commands(config, place / name).items():
                started = time.monotonic()
                work() if name == "first" else _completed(work)
                seconds[command] = time.monotonic() - started
        return cls(config, place / "whole", seconds)

    def run_up_to(self, folder: Path, command: str) -> None:
        """Run the commands before one in a folder."""
        for _, work in itertools.takewhile(lambda item: item[0] != command, commands(self.config, folder).items()):
            _completed(work)

    def completed(self, folder: Path, command: str = "train") -> list[str]:
        """Run a command and those after it to their end; in what that differs from a run without a fault."""
        for name, work in itertools.dropwhile(lambda item: item[0] != command, commands(self.config, folder).items()):
            if status := ended(start(work)):
                return [f"{folder.name}: {name} ended with {status}"]
        return self.differences(folder)

    def differences(self, folder: Path) -> list[str]:
        """In what a run that has ended differs from the one without a fault."""
        expected, found = outcome(self.folder), outcome(folder)
        return [f"{folder.name}: {name}" for name in expected if expected[name] != found[name]]


def commands(config: Config, folder: Path) -> dict[str, Work]:
    """What is done to a run: its training, which evaluates at its end, and one more evaluation."""
    return {
        "train": lambda: launch.run(Plan(config, folder, ("posbench", "train"))),
        "evaluate": lambda: launch.evaluate_runs([folder], ["ratio=1,2,4,6"]),
    }


def outcome(folder: Path) -> dict[str, Any]:
    """All that a run comes to, less times and memory."""
    last, record = max((folder / "checkpoint").glob("step-*")), load_record(folder)
    return {
        "files": sorted(path.name for path in folder.iterdir()),
        "temporaries": [str(path) for path in folder.rglob(".tmp-*")],
        "step": last.name,
        **{name: _sha256(last / name) for name in ("model.safetensors", "optimizer.pt")},
        "rows": [{k: v for k, v in row.items() if k not in _OF_TIME} for row in read_rows(folder)],
        "record": {name: record[name] for name in _OF_RECORD},
        "timed": all(record[name] for name in ("train_seconds", "cpu_seconds")),
    }


def faults_of(folder: Path, every: int) -> list[str]:
    """What of a folder whose owner was killed cannot be read, or is lost; `every`: steps between checkpoints."""
    try:
        if (folder / "config.yaml").exists():
            load_config(folder)
        if (folder / "run.json").exists():
            load_record(folder)
        evaluation_rows(folder)
        logged = max((row["step"] for row in training_rows(folder)), default=0)
        newest = checkpoint.newest(folder)
    except PosbenchError as error:
        return [f"{folder.name}: {error}"]
    step = newest.step if newest else 0
    paths = (folder / "checkpoint").glob("step-*")
    faults = [f"{folder.name}: {path.name} is damaged" for path in paths if not _verifies(path)]
    return faults + ([f"{folder.name}: step {logged} was logged, {step} is saved"] if logged - step > every else [])


def _verifies(path: Path) -> bool:
    """Whether a checkpoint's files are those of its manifest, as anyone could find out."""
    entries = json.loads((path / "manifest.json").read_bytes())["files"] if (path / "manifest.json").exists() else {}
    found = {file.name: _sha256(file) for file in path.iterdir() if file.name != "manifest.json"}
    return bool(found) and {name: entry["sha256"] for name, entry in entries.items()} == found


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# -- processes ---------------------------------------------------------------------------------------------------------


def start(work: Work, before: Work = lambda: None) -> int:
    """Start a command as the command line would, in a forked child that calls `before` first; its process id."""

    def quietly() -> None:
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 -- the process ends with it
        before()
        os._exit(exits.run(work))

    return start_child(quietly)


def ended(child: int, within: float = 120.0) -> int | None:
    """The exit status of a child, negative for a signal; None if it goes on for longer than so many seconds."""
    until = time.monotonic() + within
    while time.monotonic() <= until:
        process, status = os.waitpid(child, os.WNOHANG)
        if process:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return None


def killed(child: int, number: signal.Signals = signal.SIGKILL) -> int:
    """Send a child a signal and wait for its end; its exit status."""
    os.kill(child, number)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _completed(work: Work) -> None:
    status = ended(start(work))
    assert status == 0, f"a run that nothing was done to ended with {status}"


# -- the calls that change a disk --------------------------------------------------------------------------------------


class Boundaries:
    """The calls by which this process changes a disk, one after the other; at one of them it may kill itself.

    Args:
        at: which call, from 0 on; None: none, they are listed.
        moment: before, half (of a write, after half of its bytes) or after; "fails": the call fails, nobody dies.
    """

    def __init__(self, at: int | None = None, moment: str = "before") -> None:
        self.at, self.moment, self.calls = at, moment, list[str]()

    def install(self) -> None:
        """Watch this process from here on, for good: for a forked child."""
        for name in _CALLS:
            setattr(os, name, self._watched(f"os.{name}", getattr(os, name)))
        opened = builtins.open

        def watched_open(file: Any, mode: str = "r", buffering: int = -1, *given: Any, **named: Any) -> Any:
            if not set(mode) & set("wax+"):
                return opened(file, mode, buffering, *given, **named)
            return self._file(file, mode, buffering, *given, **named)

        builtins.open = io.open = watched_open  # pathlib's are of io

    def reached(self, name: str, call: Callable[[], Any], half: Callable[[], Any] = lambda: None) -> Any:
        """Make a call, or die at it."""
        mine = len(self.calls) == self.at
        self.calls.append(name)
        if mine and self.moment == "fails":
            raise OSError(errno.EIO, os.strerror(errno.EIO), name)
        if mine and self.moment != "after":
            if self.moment == "half":
                half()
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return call()
        finally:
            if mine:
                os.kill(os.getpid(), signal.SIGKILL)

    def _watched(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given, **named: self.reached(name, lambda: original(*given, **named))

    def _file(self, file: Any, mode: str, buffering: int = -1, encoding: Any = None, errors: Any = None,
              newline: Any = None, closefd: bool = True, opener: Any = None) -> Any:  # fmt: skip
        raw_mode = mode.replace("b", "").replace("t", "")
        raw = self.reached(f"open {mode}", lambda: _Watched(file, raw_mode, closefd, opener))
        raw.boundaries = self
        if buffering == 0:
            return raw
        buffer = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffer if "b" in mode else io.TextIOWrapper(buffer, encoding, errors, newline, buffering == 1)


class _Watched(io.FileIO):
    boundaries: Boundaries

    def write(self, data: Any, /) -> int:
        write, half = super().write, bytes(data)[: len(data) // 2]
        return int(self.boundaries.reached("write", lambda: write(data), lambda: write(half)))

    def truncate(self, size: int | None = None, /) -> int:
        truncate = super().truncate
        return int(self.boundaries.reached("truncate", lambda: truncate(size)))


def listed(work: Work, into: Path) -> list[str]:
    """The calls by which a command changes a disk, in order; it runs to its end."""

    def watched() -> None:
        boundaries, calls = Boundaries(), os.open(into, os.O_WRONLY | os.O_CREAT)
        pwrite = os.pwrite
        boundaries.install()
        work()
        pwrite(calls, json.dumps(boundaries.calls).encode(), 0)

    _completed(watched)
    calls: list[str] = json.loads(into.read_bytes())
    return calls


# -- kills -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Kill:
    """A kill, and what it did; the kills of one run come one after the other, the last with what that came to."""

    of: str  # the command
    unreadable: list[str]
    differing: list[str] | None = None  # None: the run has not come to its end


def at_random(case: Case, place: Path, seed: int) -> Iterator[Kill]:
    """Kills at random moments of runs that are started again until they complete; without end."""
    rng, every = random.Random(seed), case.config.runtime.checkpoint_every_steps or 0
    for number in itertools.count():
        folder, kill = place / f"run-{number}", None
        for command, work in commands(case.config, folder).items():
            for attempt in itertools.count():
                child = start(work)
                longest = 1.5 * case.seconds[command] * 2 ** (attempt // 4)  # this machine may be slower by now
                status = ended(child, rng.uniform(0, longest))
                status = killed(child) if status is None else status
                if status != -signal.SIGKILL:  # it was done before its time
                    assert status == 0, f"{command} in {folder} ended with {status}"
                    break
                if kill:
                    yield kill
                kill = Kill(command, faults_of(folder, every))
        if kill:
            kill.differing = case.differences(folder)
            yield kill


def at_boundaries(case: Case, place: Path, command: str, moment: str) -> Iterator[Kill]:
    """One kill for each call by which a command changes a disk, each of a run of its own, which is then completed.

    At the moment "fails" the call ends with an input/output error instead.
    """
    before = place / "before"
    case.run_up_to(before, command)

    def ready(folder: Path) -> Work:
        if before.exists():
            shutil.copytree(before, folder)
        return commands(case.config, folder)[command]

    calls = listed(ready(place / "listed"), place / "calls.json")
    for at, name in enumerate(calls):
        if moment == "half" and name != "write":
            continue
        folder = place / f"{command}-{moment}-{at}-{name.replace(' ', '-')}"
        status = ended(start(ready(folder), Boundaries(at, moment).install))
        expected = (0, 1, 2) if moment == "fails" else (-signal.SIGKILL,)
        assert status in expected, f"{folder.name} of {len(calls)} calls ended with {status}"
        kill = Kill(command, faults_of(folder, case.config.runtime.checkpoint_every_steps or 0))
        kill.differing = case.completed(folder, command)
        yield kill
