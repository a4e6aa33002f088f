"""Kills at random moments and amid writes: nothing is unreadable, no number is another,
and a run has one owner.

Runs are forked from this process, so that torch is imported once. A process that is
killed loses what it had in memory and nothing that it gave to the system: what a power
failure takes with it is not tried here.
"""

import builtins
import hashlib
import io
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import EVERY, changed, start_child, write_words

from posbench.config.schema import Config
from posbench.launch import execute as launch
from posbench.launch.plans import Plan
from posbench.run import checkpoint
from posbench.run.folder import evaluated_config, load_config
from posbench.run.rows import evaluation_rows, read_rows, training_rows
from posbench.run.saved import load_record
from posbench.terminal import exits

# some hundred runs, on a busy machine too
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

KILLS = 20
RACES = 5
_OF_TIME = {"seconds", "train/tokens_per_second", "peak_memory_bytes"}
_OF_RECORD = ("status", "reason", "tokens", "parameters", "data", "tokenizer_sha256")


def saving(config: Config, place: Path, steps: int, every: int) -> Config:
    """Return a configuration of `steps` updates, saved after each `every`; write its
    text of random words.
    """
    write_words(place)
    return changed(
        config,
        data={"path": str(place / "text.txt")},
        training={"tokens": 16 * 8 * steps},
        runtime={"checkpoint_every_steps": every, "validate_every_steps": 3},
        evaluation={"ratios": (1, 2), "blocks": 8},
    )


def work(config: Config, folder: Path) -> None:
    """Prepare the text, train, evaluate, and evaluate further, as two commands that are
    repeated would.
    """
    config = changed(config, runtime={"cache": f"{folder}-cache"})
    plan = Plan(config, folder, ("posbench", "train"))
    launch.run(plan)
    launch.evaluate_runs({folder: evaluated_config(folder, ["ratio=1,2,4,6"])}, print)


def start(
    config: Config, folder: Path, before: Callable[[], object] = lambda: None
) -> int:
    """Start `work` in a forked child that calls `before` first; return its process
    id.
    """

    def quietly() -> None:
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 -- the process ends with it
        before()
        code = exits.run(lambda: work(config, folder))
        os._exit(code)

    return start_child(quietly)


def status_of(child: int) -> int:
    """Wait for a child's end; return its exit status, negative for a signal."""
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def outcome(folder: Path) -> dict[str, Any]:
    """Return everything that a run results in, except times and memory."""
    last = max((folder / "checkpoint").glob("step-*"))
    record = load_record(folder)
    rows = read_rows(folder)
    for row in rows:
        for name in _OF_TIME:
            row.pop(name, None)
    return {
        "files": sorted(path.name for path in folder.iterdir()),
        "temporaries": [str(path) for path in folder.rglob(".tmp-*")],
        "step": last.name,
        "weights": digest_of(last / "model.safetensors"),
        "optimizer": digest_of(last / "optimizer.pt"),
        "rows": rows,
        "record": {name: getattr(record, name) for name in _OF_RECORD},
        "train_is_timed": record.train_seconds > 0,
        "cpu_is_timed": record.cpu_seconds > 0,
    }


def check_readable(folder: Path, lost: int) -> None:
    """Read all that a killed run has left; at most `lost` of the logged updates may be
    unsaved.
    """
    if (folder / "run.json").exists():  # it comes after config.yaml
        load_config(folder)
        load_record(folder)
        evaluation_rows(folder)
        logged = [row["step"] for row in training_rows(folder)]
        saved = 0
        # of which every file has the digest of its manifest
        newest = checkpoint.newest(folder)
        if newest:
            saved = newest.step
        n_unsaved = max(logged, default=0) - saved
        assert n_unsaved <= lost, folder.name


@pytest.mark.parametrize(
    ("number", "optimizer"),
    [(signal.SIGKILL, "adamw"), (signal.SIGKILL, "muon"), (signal.SIGTERM, "adamw")],
)
def test_signals_at_random_moments_leave_nothing_unreadable_and_change_no_number(
    tiny_config, tmp_path, number, optimizer
):
    """40 updates, saved after every fifth; SIGTERM saves the last one."""
    config = saving(tiny_config, tmp_path, 40, 5)
    config = changed(config, training={"optimizer": optimizer})
    n_lost = 0 if number == signal.SIGTERM else 5
    chance = random.Random(0)
    kills = 0
    work(config, tmp_path / "first")  # it imports what the others find
    began = time.monotonic()
    whole = start(config, tmp_path / "whole")
    assert status_of(whole) == 0
    seconds = time.monotonic() - began
    expected = outcome(tmp_path / "whole")

    while kills < KILLS // 2:
        folder = tmp_path / f"run-{kills}"
        for attempt in range(10_000):
            child = start(config, folder)
            longest = 1.2 * seconds * 1.1**attempt  # the machine may be slower by now
            time.sleep(chance.uniform(0, longest))
            sent = time.monotonic()
            os.kill(child, number)
            status = status_of(child)
            waited = time.monotonic() - sent
            assert waited < 10
            if status == 0:  # it was done before its time
                break
            # the latter: it has saved itself
            assert status in (-number, 128 + signal.SIGTERM)
            check_readable(folder, n_lost)
            kills += 1
        assert outcome(folder) == expected, folder.name


class Watch:
    """Count the moments before this process changes the disk, and amid each write; kill
    the process at moment `at`.
    """

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.number = 0

    def reach(self) -> None:
        if self.number == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.number += 1

    def install(self) -> None:
        """Watch this process from here on, for good: for a forked child."""
        for name in (
            "open",
            "rename",
            "replace",
            "mkdir",
            "unlink",
            "remove",
            "rmdir",
            "write",
        ):
            original = getattr(os, name)

            def watched(*given, original=original, **named):
                return self.reach() or original(*given, **named)

            setattr(os, name, watched)
        opened = builtins.open
        reach = self.reach

        class Watched(io.FileIO):
            def write(self, data: Any, /) -> int:
                content = bytes(data)
                half = len(content) // 2
                reach()
                written = super().write(content[:half])
                reach()
                return written + super().write(content[half:])

        def watched_open(
            file: Any,
            mode: str = "r",
            buffering: int = -1,
            encoding: Any = None,
            *rest: Any,
        ) -> Any:
            if not set(mode) & set("wax+"):
                return opened(file, mode, buffering, encoding, *rest)
            reach()
            mode_of_bytes = mode.replace("b", "").replace("t", "")
            raw = Watched(file, mode_of_bytes)
            if buffering == 0:
                return raw
            buffered = io.BufferedRandom if "+" in mode else io.BufferedWriter
            buffer = buffered(raw)
            if "b" in mode:
                return buffer
            return io.TextIOWrapper(buffer, encoding, *rest, write_through=True)

        builtins.open = io.open = watched_open  # pathlib's are of io


def test_a_kill_at_any_change_of_the_disk_changes_no_number(tiny_config, tmp_path):
    """Three updates, each of them saved, so that the third save drops the first."""
    config = saving(tiny_config, tmp_path, 3, 1)
    watch = Watch()
    config = changed(config, evaluation={"protocols": ("fixed_target",)})
    work(config, tmp_path / "whole")
    expected = outcome(tmp_path / "whole")

    def count() -> None:
        watch.install()
        work(config, tmp_path / "counted")
        Path(tmp_path, "count").write_text(str(watch.number))
        os._exit(0)

    counting = start_child(count)
    assert status_of(counting) == 0
    n_moments = int((tmp_path / "count").read_text())
    assert n_moments > 150
    step = 1 if EVERY else 7
    for at in range(0, n_moments, step):
        folder = tmp_path / f"kill-{at}"
        killed = start(config, folder, Watch(at).install)
        assert status_of(killed) == -signal.SIGKILL
        check_readable(folder, 1)
        again = start(config, folder)
        assert status_of(again) == 0
        assert outcome(folder) == expected, folder.name


def test_of_two_trainings_at_once_one_wins_and_the_other_changes_nothing(
    tiny_config, tmp_path
):
    config = saving(tiny_config, tmp_path, 30, 10)
    work(config, tmp_path / "whole")
    expected = outcome(tmp_path / "whole")
    statuses = []
    for trial in range(RACES):
        folder = tmp_path / f"run-{trial}"
        children = [start(config, folder), start(config, folder)]
        ends = sorted(status_of(child) for child in children)
        assert set(ends) <= {0, 75}, trial
        statuses.append(ends)
        again = start(config, folder)
        assert status_of(again) == 0, trial
        assert outcome(folder) == expected, trial
    assert [0, 75] in statuses
