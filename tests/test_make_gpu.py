"""`make gpu` without a GPU: its table has a verdict for each step, whatever happens."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "gpu.sh"
PYTHON = """#!/bin/sh
case "$*" in
    *"posbench train"*) echo "15:00:00 at 64 tokens: 2.5 nats/token" ;;
    *"posbench sweep"*) echo "error: no room" >&2; exit 1 ;;
    *pytest*) echo "$TESTS" ;;
    *"--shape 12m"*) sleep 60 ;;
    *"--shape 124m"*) echo "rope  393,216  0.93  0.92-0.94  8,192  38%" ;;
esac
"""


@pytest.fixture
def start(tmp_path):
    """Return a function that starts the script with a Python that only pretends."""
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)

    def started(
        limit: int, tests: str = "438 passed, 6 skipped in 99.10s"
    ) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [SCRIPT, python],
            cwd=tmp_path,
            env={**os.environ, "LIMIT": str(limit), "TESTS": tests},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    return started


def verdicts_in(printed: str) -> dict[str, str]:
    """Return the verdicts in the table at the end, by step."""
    _, _, table = printed.partition("\nAfter ")
    verdicts = {}
    for line in table.splitlines()[1:]:
        step = line[17:].split()[0]  # after the verdict and the seconds
        verdicts[step] = line[:8].strip()
    return verdicts


def test_each_step_has_a_verdict_whatever_happens(start):
    process = start(limit=6)
    printed = process.communicate()[0]

    verdicts = verdicts_in(printed)
    for step in ("bf16", "compiled", "long", "task", "recomputed", "whole", "tests"):
        assert verdicts[step] == "ok"
    assert verdicts["sweep"] == "FAILED"
    assert verdicts["equal"] == "FAILED"
    assert verdicts["speed_12m"] == "too long"
    assert verdicts["compiled_fire"] == "no time"
    assert process.returncode == 1
    assert "error: no room" in printed


def test_tests_that_were_all_skipped_are_not_called_ok(start):
    process = start(limit=60, tests="444 skipped in 9.10s")
    for line in process.stdout:
        if " tests " in line:
            break
    process.send_signal(signal.SIGTERM)
    printed = process.communicate(timeout=20)[0]

    assert line.startswith("skipped ")
    assert "444 skipped" in line
    assert verdicts_in(printed)["tests"] == "skipped"


def test_a_signal_ends_the_steps_and_the_table_comes(start):
    process = start(limit=60)
    for line in process.stdout:
        if "tests" in line:
            break
    process.send_signal(signal.SIGTERM)
    printed = process.communicate(timeout=20)[0]

    assert "stopped" in printed
    assert verdicts_in(printed)["sweep"] == "FAILED"
    assert process.returncode == 1
