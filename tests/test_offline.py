"""Tests use no network, and neither does any Python process that they start."""

import socket
import subprocess
import sys

import pytest

ELSEWHERE = "192.0.2.1"  # kept for documentation: nobody has it (RFC 5737)


@pytest.mark.parametrize("host", [ELSEWHERE, "huggingface.co"])
def test_nothing_leaves_this_machine(host):
    with pytest.raises(ConnectionRefusedError, match="tests use no network"):
        socket.create_connection((host, 443), timeout=1)


@pytest.mark.parametrize("options", [[], ["-P"]])
def test_nothing_leaves_it_from_a_process_of_a_test(options):
    code = f"import socket; socket.create_connection(('{ELSEWHERE}', 443), timeout=1)"
    python = [sys.executable, *options, "-c", code]
    done = subprocess.run(python, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "tests use no network" in done.stderr
