"""Processes of one run as users start them: by posbench, by torchrun, and ended by
signals and kills.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import TINY, each_once, until, write_text

from posbench import machine
from posbench.run.rows import training_rows
from posbench.run.saved import load_record

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(machine.cores() < 2, reason="needs two cores"),
]

ARGUMENTS = [
    *TINY,
    "data.path=text.txt",
    "training.precision=fp32",
    "runtime.cache=cache",
    "log_every_steps=1",
]
SHORT = ["training.tokens=1024"]
LONG = ["training.tokens=1000000", "checkpoint_every_steps=100000"]
HERE = ("-m", "posbench")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "posbench")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write_text()


def start(
    study: str, *words: str, by: tuple[str, ...] = HERE
) -> "subprocess.Popen[str]":
    settings = each_once([*ARGUMENTS, *words, f"study={study}"])
    command = [sys.executable, *by, "train", *settings]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def folder(study: str) -> Path:
    (path,) = Path("outputs", study).glob("[!.]*")
    return path


def losses(study: str) -> list[float]:
    rows = training_rows(folder(study))
    return [row["train/loss"] for row in rows if "train/loss" in row]


def start_two() -> tuple["subprocess.Popen[str]", list[int]]:
    """Start a long run in two processes, and wait until they train; return what started
    them, and their ids.
    """

    def trains() -> bool:
        rows = list(Path("outputs/two").glob("*/rows.jsonl"))
        return bool(rows) and len(losses("two")) > 20

    process = start("two", *LONG, "processes=2")
    until(trains, 120)
    command = ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(process.pid)]
    listed = subprocess.run(command, capture_output=True, text=True)
    ranks = []
    for line in listed.stdout.splitlines():
        pid, _, arguments = line.strip().partition(" ")
        if "spawn_main" in arguments:
            ranks.append(int(pid))
    assert len(ranks) == 2
    return process, ranks


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_two_processes_of_torchrun_give_what_one_gives():
    one = start("one", *SHORT)
    assert one.wait() == 0
    two = start("two", *SHORT, by=TORCHRUN)
    _, errors = two.communicate()
    assert two.returncode == 0, errors
    assert errors.count("Run folder") <= 1
    record = load_record(folder("two"))
    expected = losses("one")
    assert record.attempt["processes"] == 2
    assert losses("two") == pytest.approx(expected, abs=1.5e-6)
    assert len(expected) == 16


def test_sigterm_to_one_process_saves_the_run_and_ends_all():
    process, (first, second) = start_two()

    os.kill(second, signal.SIGTERM)

    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    assert errors.count("error: stopped by SIGTERM after step") == 1
    assert not is_running(first)
    assert not is_running(second)
    run = folder("two")
    record = load_record(run)
    assert record.status == "stopped"
    (saved,) = (run / "checkpoint").iterdir()
    n_updates = len(losses("two"))
    assert saved.name == f"step-{n_updates:08d}"


def test_no_process_outlives_the_first():
    process, (first, second) = start_two()
    process.kill()
    process.wait()
    until(lambda: not is_running(first), 30)
    until(lambda: not is_running(second), 30)
