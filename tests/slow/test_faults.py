"""Damage, signals and races, each as often as says something: all noticed, all saved, one owner."""

import contextlib
import dataclasses
import functools
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from disks import start_child
from faults import Case, commands, ended, killed, start
from support import snapshot

from posbench import report
from posbench.config.schema import Config
from posbench.errors import InUse
from posbench.run import checkpoint
from posbench.run.rows import read_rows
from posbench.run.run import Run, load_record
from posbench.training.train import train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # some hundred runs, on a busy machine too

STOPS, STOPS_ELSEWHERE, READERS, RACES = 50, 10, 10, 50
WITHIN = 10.0  # seconds from a signal to the end of the process
EVALUATED = b'"protocol"'  # what rows of an evaluation have


@pytest.fixture
def case(tiny_config: Config, tmp_path: Path) -> Case:
    """60 updates, saved after every 25th."""
    parts: dict[str, dict[str, Any]] = {
        "training": {"tokens": 16 * 8 * 60},
        "evaluation": {"ratios": (1, 2), "blocks": 8},
    }
    return Case.make(tiny_config, tmp_path, runtime={"checkpoint_every_steps": 25}, **parts)


def lines(path: Path, of: bytes = b"\n") -> int:
    return path.read_bytes().count(of) if path.exists() else 0


def wait(reached: Callable[[], object]) -> None:
    until = time.monotonic() + 120
    while not reached():
        assert time.monotonic() < until, "it never came so far"
        time.sleep(0.001)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "state.json", "manifest.json"])
def test_a_run_whose_newest_checkpoint_has_a_flipped_bit_ends_as_if_it_had_not(
    case: Case, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "damaged"
    child = start(commands(case.config, folder)["train"])
    wait(lambda: lines(folder / "rows.jsonl") > 30)
    killed(child, signal.SIGTERM)
    older, newest = sorted((folder / "checkpoint").iterdir())
    assert older.name == "step-00000025" and newest.name < "step-00000060"
    damaged = bytearray((newest / name).read_bytes())
    bit = random.Random(1).randrange(8 * len(damaged))
    damaged[bit // 8] ^= 1 << bit % 8
    (newest / name).write_bytes(damaged)
    assert case.completed(folder) == []
    log = (folder / "log.txt").read_text(encoding="utf-8")
    assert f"{newest.name} is incomplete" in log and "continuing from step 25" in log


# -- SIGTERM -----------------------------------------------------------------------------------------------------------

Begin = Callable[[Path, random.Random], tuple[int, Callable[[], object]]]  # a child, and whether it came so far


def stopped(place: Path, count: int, begin: Begin, over: Callable[[Path], object], delay: float) -> Iterator[Path]:
    """Folders of runs that SIGTERM stopped soon after they came so far; one more is tried where it was over."""
    chance, stops = random.Random(0), 0
    for trial in itertools.count():
        folder = place / f"trial-{trial}"
        child, reached = begin(folder, chance)
        wait(reached)
        time.sleep(chance.uniform(0, delay))
        sent = time.monotonic()
        status = killed(child, signal.SIGTERM)
        assert time.monotonic() - sent < WITHIN
        if over(folder):
            continue
        assert status == 143
        yield folder
        stops += 1
        if stops == count:
            return


def test_a_run_that_is_told_to_stop_in_training_is_saved_at_once_and_goes_on_bit_exactly(
    case: Case, tmp_path: Path
) -> None:
    def begin(folder: Path, chance: random.Random) -> tuple[int, Callable[[], object]]:
        logged = chance.randrange(1, 59)
        return start(commands(case.config, folder)["train"]), lambda: lines(folder / "rows.jsonl") >= logged

    def over(folder: Path) -> bool:
        return lines(folder / "rows.jsonl", EVALUATED) > 0 or lines(folder / "rows.jsonl") == 60

    for folder in stopped(tmp_path, STOPS, begin, over, 0.02):
        record, saved = load_record(folder), checkpoint.newest(folder)
        assert (record["status"], record["reason"]) == ("stopped", "signal")
        assert saved and f"SIGTERM after step {saved.step}; saved" in record["message"]
        assert read_rows(folder)[-1]["step"] == saved.step  # no update was lost
        assert case.completed(folder) == []


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_a_run_that_is_told_to_stop_in_its_evaluation_keeps_its_rows_and_completes(
    case: Case, tmp_path: Path, command: str
) -> None:
    first, n_rows = {"train": (0, 5), "evaluate": (5, 7)}[command]  # rows before and after the command

    def begin(folder: Path, chance: random.Random) -> tuple[int, Callable[[], object]]:
        measured = chance.randrange(first, n_rows)
        case.run_up_to(folder, command)
        rows, log, last = folder / "rows.jsonl", folder / "log.txt", folder / "checkpoint" / "step-00000060"
        before = lines(log)
        child = start(commands(case.config, folder)[command])
        return child, lambda: lines(log) > before and last.exists() and lines(rows, EVALUATED) >= measured

    for folder in stopped(
        tmp_path, STOPS_ELSEWHERE, begin, lambda folder: lines(folder / "rows.jsonl", EVALUATED) == n_rows, 0.01
    ):
        record = load_record(folder)
        assert record["status"] == {"train": "stopped", "evaluate": "done"}[command]
        assert command == "evaluate" or "stopped by SIGTERM; finished work is kept" in record["message"]
        assert case.completed(folder, command) == []


def test_a_run_that_is_told_to_stop_while_it_prepares_its_text_leaves_no_run_and_completes(
    case: Case, tmp_path: Path
) -> None:
    text = Path(str(case.config.data.path))
    text.write_text(" ".join([text.read_text(encoding="utf-8")] * 60), encoding="utf-8")

    def train_in(folder: Path) -> int:
        runtime = dataclasses.replace(case.config.runtime, cache=f"{folder}-cache")
        return start(commands(dataclasses.replace(case.config, runtime=runtime), folder)["train"])

    def tokens(folder: Path, pattern: str) -> list[Path]:
        return list(tmp_path.glob(f"{folder.name}-cache/tokens/{pattern}"))

    for folder in stopped(
        tmp_path,
        STOPS_ELSEWHERE,
        lambda folder, chance: (train_in(folder), lambda: tokens(folder, ".tmp-*")),
        lambda folder: tokens(folder, "*/meta.json"),
        0.2,
    ):
        assert not folder.exists() and ended(train_in(folder)) == 0 and not tokens(folder, ".tmp-*")


# -- a reader beside the run, and one owner ----------------------------------------------------------------------------


def test_a_report_of_a_run_that_trains_disturbs_nothing(case: Case, tmp_path: Path) -> None:
    chance = random.Random(0)
    for trial in map(str, range(READERS)):
        folder, begun = tmp_path / trial, chance.randrange(1, 59)
        child = start(commands(case.config, folder)["train"])
        wait(lambda folder=folder, begun=begun: lines(folder / "rows.jsonl") >= begun)
        reader = start(functools.partial(report.main, [folder], tmp_path / f"report-{trial}"))
        assert ended(reader) == 0 and (tmp_path / f"report-{trial}" / "index.html").exists()
        assert ended(child) == 0 and case.completed(folder) == []


def test_of_two_trainings_started_at_once_one_wins_and_the_other_changes_no_byte(case: Case, tmp_path: Path) -> None:
    opened = Run.open
    with opened(tmp_path / "lone" / "run", case.config, ["posbench", "train"]):
        expected = snapshot(tmp_path / "lone" / "run")
    for trial in range(RACES):
        folder = tmp_path / str(trial) / "run"
        (answers, answer), (held, release) = os.pipe(), os.pipe()

        def contend(folder: Path = folder, answer: int = answer, held: int = held, release: int = release) -> None:
            @contextlib.contextmanager
            def open_and_wait(*given: Any, **named: Any) -> Iterator[Run]:
                with opened(*given, **named) as run:
                    os.write(answer, b"W")
                    os.close(release)
                    os.read(held, 1)  # owner until both have answered
                    yield run

            Run.open = open_and_wait  # type: ignore[method-assign]
            try:
                train(case.config, folder, ["posbench", "train"])
            except InUse:
                os.write(answer, b"L")

        children = [start_child(contend), start_child(contend)]
        told = os.read(answers, 1) + os.read(answers, 1)
        found = snapshot(folder)
        os.close(release)
        assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
        for descriptor in (answers, answer, held):
            os.close(descriptor)
        assert sorted(told) == sorted(b"WL") and found == expected, trial
