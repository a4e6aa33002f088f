"""Damage, signals and races, each as often as says something: all noticed, all saved, one owner."""

import contextlib
import dataclasses
import functools
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

FLIPS, STOPS, STOPS_ELSEWHERE, READERS, RACES = 300, 50, 10, 10, 50
WITHIN = 10.0  # seconds from a signal to the end of the process


@pytest.fixture
def case(tiny_config: Config, tmp_path: Path) -> Case:
    """60 updates, saved after every 25th."""
    return Case.make(
        tiny_config,
        tmp_path,
        training={"tokens": 16 * 8 * 60},
        runtime={"checkpoint_every_steps": 25},
        evaluation={"ratios": (1, 2), "blocks": 8},
    )


# -- damage ------------------------------------------------------------------------------------------------------------


def _flipped(data: bytes, chance: random.Random) -> bytes:
    bit = chance.randrange(8 * len(data))
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "state.json", "manifest.json"])
def test_a_run_whose_newest_checkpoint_has_a_flipped_bit_ends_as_if_it_had_not(
    case: Case, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "damaged"
    child = start(commands(case.config, folder)["train"])
    assert stopped(child, lambda: lines(folder / "rows.jsonl") > 30, 0.0)
    older, newest = sorted((folder / "checkpoint").iterdir())
    assert older.name == "step-00000025" and newest.name < "step-00000060"
    (newest / name).write_bytes(_flipped((newest / name).read_bytes(), random.Random(1)))
    assert case.completed(folder) == []
    log = (folder / "log.txt").read_text(encoding="utf-8")
    assert f"{newest.name} is incomplete" in log and "continuing from step 25" in log


# -- SIGTERM -----------------------------------------------------------------------------------------------------------


def lines(path: Path, of: bytes = b"\n") -> int:
    """Lines of a file; those of an evaluation have `"protocol"`."""
    return path.read_bytes().count(of) if path.exists() else 0


EVALUATED = b'"protocol"'


def stopped(child: int, reached: Callable[[], bool], delay: float) -> tuple[int, float]:
    """Send SIGTERM some seconds after a child has come so far; its exit status, and the seconds that its end took."""
    until = time.monotonic() + 120
    while not reached():
        assert time.monotonic() < until, "it never came so far"
        time.sleep(0.001)
    time.sleep(delay)
    sent = time.monotonic()
    return killed(child, signal.SIGTERM), time.monotonic() - sent


def test_a_run_that_is_told_to_stop_in_training_is_saved_at_once_and_goes_on_bit_exactly(
    case: Case, tmp_path: Path
) -> None:
    chance, stops, tries, longest = random.Random(0), 0, 0, 0.0
    while stops < STOPS:
        tries += 1
        folder, logged = tmp_path / str(tries), chance.randrange(1, 59)
        metrics = folder / "rows.jsonl"
        child = start(commands(case.config, folder)["train"])
        begun = functools.partial(lambda path, least: lines(path) >= least, metrics, logged)
        status, seconds = stopped(child, begun, chance.uniform(0, 0.02))
        record = load_record(folder)
        if lines(metrics, EVALUATED) or lines(metrics) == 60:  # training was over
            continue
        loaded = checkpoint.newest(folder)
        assert status == 143 and (record["status"], record["reason"]) == ("stopped", "signal")
        assert loaded and f"SIGTERM after step {loaded.step}; saved" in record["message"]
        assert read_rows(folder)[-1]["step"] == loaded.step  # no update was lost
        assert case.completed(folder) == []
        stops, longest = stops + 1, max(longest, seconds)
    print(f"{stops} SIGTERMs in training, of {tries} tries; the longest took {longest:.2f} s to end")
    assert stops == STOPS and longest < WITHIN


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_a_run_that_is_told_to_stop_in_its_evaluation_keeps_its_rows_and_completes(
    case: Case, tmp_path: Path, command: str
) -> None:
    first, n_rows = {"train": (0, 5), "evaluate": (5, 7)}[command]  # rows before and after the command
    chance, stops, tries, longest = random.Random(0), 0, 0, 0.0
    while stops < STOPS_ELSEWHERE:
        tries += 1
        folder, measured = tmp_path / str(tries), chance.randrange(first, n_rows)
        case.run_up_to(folder, command)
        rows, log, last = folder / "rows.jsonl", folder / "log.txt", folder / "checkpoint" / "step-00000060"
        said = lines(log)

        def begun(rows: Path = rows, log: Path = log, last: Path = last, said: int = said, n: int = measured) -> bool:
            return lines(log) > said and last.exists() and lines(rows, EVALUATED) >= n

        child = start(commands(case.config, folder)[command])
        status, seconds = stopped(child, begun, chance.uniform(0, 0.01))
        if lines(rows, EVALUATED) == n_rows:  # it was over
            continue
        record = load_record(folder)
        assert status == 143
        assert record["status"] == {"train": "stopped", "evaluate": "done"}[command]
        assert command == "evaluate" or "stopped by SIGTERM; finished work is kept" in record["message"]
        assert case.completed(folder, command) == []
        stops, longest = stops + 1, max(longest, seconds)
    print(f"{stops} SIGTERMs in the evaluation of {command}, of {tries} tries; the longest took {longest:.2f} s to end")
    assert stops == STOPS_ELSEWHERE and longest < WITHIN


def test_a_run_that_is_told_to_stop_while_it_prepares_its_text_leaves_no_run_and_completes(
    case: Case, tmp_path: Path
) -> None:
    text = Path(str(case.config.data.path))
    text.write_text(" ".join([text.read_text(encoding="utf-8")] * 60), encoding="utf-8")
    chance, stops, tries, longest = random.Random(0), 0, 0, 0.0
    while stops < STOPS_ELSEWHERE:
        tries += 1
        folder, cache = tmp_path / f"run-{tries}", tmp_path / f"cache-{tries}"
        config = dataclasses.replace(case.config, runtime=dataclasses.replace(case.config.runtime, cache=str(cache)))
        child = start(commands(config, folder)["train"])
        begun = functools.partial(lambda cache: any(cache.glob("tokens/.tmp-*")), cache)
        status, seconds = stopped(child, begun, chance.uniform(0, 0.2))
        if any(cache.glob("tokens/*/meta.json")):  # it was over
            continue
        assert status == 143 and not folder.exists()
        assert ended(start(commands(config, folder)["train"])) == 0
        assert not list(cache.glob("tokens/.tmp-*"))
        stops, longest = stops + 1, max(longest, seconds)
    print(f"{stops} SIGTERMs in data preparation, of {tries} tries; the longest took {longest:.2f} s to end")
    assert stops == STOPS_ELSEWHERE and longest < WITHIN


# -- a reader beside the run ------------------------------------------------------------------------------------------


def test_a_report_of_a_run_that_trains_disturbs_nothing(case: Case, tmp_path: Path) -> None:
    chance = random.Random(0)
    for trial in map(str, range(READERS)):
        folder = tmp_path / trial
        child, begun = start(commands(case.config, folder)["train"]), chance.randrange(1, 59)
        while lines(folder / "rows.jsonl") < begun:
            time.sleep(0.001)
        reader = start(functools.partial(report.main, [folder], tmp_path / f"report-{trial}"))
        assert ended(reader) == 0 and (tmp_path / f"report-{trial}" / "index.html").exists()
        assert ended(child) == 0 and case.completed(folder) == []


# -- one owner ---------------------------------------------------------------------------------------------------------


def test_of_two_trainings_started_at_once_one_wins_and_the_other_changes_no_byte(case: Case, tmp_path: Path) -> None:
    winners = 0
    lone = tmp_path / "lone" / "run"
    with Run.open(lone, case.config, ["posbench", "train"]):
        expected = snapshot(lone)
    for trial in range(RACES):
        folder = tmp_path / str(trial) / "run"
        gate, answers, release = os.pipe(), os.pipe(), os.pipe()

        def contend(
            folder: Path = folder,
            gate: tuple[int, int] = gate,
            answers: tuple[int, int] = answers,
            release: tuple[int, int] = release,
        ) -> None:
            opened = Run.open

            @contextlib.contextmanager
            def held(*given: Any, **named: Any) -> Iterator[Run]:
                with opened(*given, **named) as run:
                    os.write(answers[1], b"W")
                    os.read(release[0], 1)  # owner until both have answered
                    yield run

            Run.open = held  # type: ignore[method-assign]
            os.close(gate[1])
            os.close(release[1])
            os.read(gate[0], 1)  # both go on when the parent closes its end
            try:
                train(case.config, folder, ["posbench", "train"])
            except InUse:
                os.write(answers[1], b"L")

        children = [start_child(contend), start_child(contend)]
        os.close(gate[1])
        told = os.read(answers[0], 1) + os.read(answers[0], 1)
        found = snapshot(folder)
        os.close(release[1])
        assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
        for descriptor in (gate[0], *answers, release[0]):
            os.close(descriptor)
        assert sorted(told) == sorted(b"WL") and load_record(folder)["attempt"]["pid"] in children, trial
        assert found == expected, trial
        winners += 1
    print(f"{winners} races, one winner in each")
    assert winners == RACES
