"""Processes of one run as users start them: by posbench, by torchrun, and ended by signals and kills."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support import TINY, each_once, write_text

from posbench import machine
from posbench.run.rows import evaluation_rows, training_rows
from posbench.run.run import load_record

pytestmark = [pytest.mark.slow, pytest.mark.skipif(machine.cores() < 2, reason="needs two cores")]

ARGUMENTS = [*TINY, "data.path=text.txt", "training.precision=fp32", "runtime.cache=cache", "log_every_steps=1"]
SHORT, LONG = ["training.tokens=1024"], ["training.tokens=1000000", "checkpoint_every_steps=100000"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write_text()


def posbench(*arguments: str, by: tuple[str, ...] = ("-m", "posbench")) -> "subprocess.Popen[str]":
    command = [sys.executable, *by, "train", *each_once([*ARGUMENTS, *arguments])]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def folder(study: str) -> Path:
    (found,) = Path("outputs", study).glob("[!.]*")
    return found


def record(study: str) -> dict[str, Any]:
    return load_record(folder(study))


def losses(study: str) -> list[float]:
    return [row["train/loss"] for row in training_rows(folder(study)) if "train/loss" in row]


def until_it_trains(process: "subprocess.Popen[str]", study: str) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        if list(Path("outputs", study).glob("*/rows.jsonl")) and len(losses(study)) > 20:
            return
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"it does not train: {process.communicate()[1]}")


def children(process: "subprocess.Popen[str]", text: str = "spawn_main") -> list[int]:
    """The processes that it has started with a text in their command lines."""
    listed = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(process.pid)], capture_output=True, text=True)
    return [int(line.split()[0]) for line in listed.stdout.splitlines() if text in line]


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def rank_of(pid: int) -> str:
    variables = Path(f"/proc/{pid}/environ").read_text(encoding="utf-8").split("\0")
    return next(text.partition("=")[2] for text in variables if text.startswith("RANK="))


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "posbench")


@pytest.mark.parametrize("started", ["here", "torchrun"])
def test_two_processes_give_what_one_gives(started: str) -> None:
    assert posbench(*SHORT, "study=one").wait() == 0
    two = posbench(
        *SHORT,
        "study=two",
        *(["processes=2"] if started == "here" else []),
        **({} if started == "here" else {"by": TORCHRUN}),
    )
    errors = two.communicate()[1]
    assert two.returncode == 0 and errors.count("Run folder") <= 1, errors
    assert record("two")["attempt"]["processes"] == 2
    assert losses("two") == pytest.approx(losses("one"), abs=1.5e-6) and len(losses("one")) == 16
    for row, expected in zip(evaluation_rows(folder("two")), evaluation_rows(folder("one")), strict=True):
        assert row.nll == pytest.approx(expected.nll, abs=1e-6) and row.targets_sha256 == expected.targets_sha256


@pytest.mark.parametrize("who", ["command", "rank 0", "rank 1"])
def test_sigterm_to_one_process_saves_the_run_and_ends_both(who: str) -> None:
    process = posbench(*LONG, "study=two", "processes=2")
    until_it_trains(process, "two")
    ranks = children(process)
    assert len(ranks) == 2
    os.kill(process.pid if who == "command" else ranks[int(who[-1])], signal.SIGTERM)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 143 and errors.count("error: stopped by SIGTERM after step") == 1, errors
    assert not any(map(is_running, ranks))
    found = record("two")
    assert (found["status"], found["reason"]) == ("stopped", "signal")
    assert [path.name for path in (folder("two") / "checkpoint").iterdir()] == [f"step-{len(losses('two')):08d}"]


def test_a_process_that_is_killed_ends_the_run_with_a_reason() -> None:
    process = posbench(*LONG, "study=two", "processes=2")
    until_it_trains(process, "two")
    os.kill(children(process)[1], signal.SIGKILL)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 137 and errors.count("error: rank 1 of 2 was killed by SIGKILL") == 1
    assert record("two")["message"] == "rank 1 of 2 was killed by SIGKILL"


def test_no_process_outlives_the_first() -> None:
    process = posbench(*LONG, "study=two", "processes=2")
    until_it_trains(process, "two")
    ranks = children(process)
    process.kill()
    process.wait()
    end = time.monotonic() + 30
    while any(map(is_running, ranks)):
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize("who", ["launcher", "rank 0", "rank 1"])
def test_sigterm_under_torchrun_stops_all_after_the_same_update(who: str) -> None:
    process = posbench(*LONG, "study=two", by=TORCHRUN)
    until_it_trains(process, "two")
    ranks = {rank_of(child): child for child in children(process, " -m posbench ")}
    assert len(ranks) == 2
    os.kill(process.pid if who == "launcher" else ranks[who[-1]], signal.SIGTERM)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode != 0 and not any(map(is_running, ranks.values()))
    assert (record("two")["status"], record("two")["reason"]) == ("stopped", "signal"), errors
    assert [path.name for path in (folder("two") / "checkpoint").iterdir()] == [f"step-{len(losses('two')):08d}"]


def test_more_than_the_cores_is_one_line() -> None:
    process = posbench("training.batch_size=1024", "training.tokens=100000", "processes=1024")
    errors = process.communicate()[1]
    assert process.returncode == 2 and "error: runtime.processes is 1024: this machine has" in errors
