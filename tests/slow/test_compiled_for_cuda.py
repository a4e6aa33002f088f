"""What is compiled for CUDA, where there is no device: it becomes binaries that fit one, and computes what it should.

Needs Triton of the version that torch has for CUDA: `.venv/bin/pip install --no-deps triton==3.7.1`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake import guard

from posbench import encodings

pytest.importorskip("triton")
from fake.cuda_compiler import SHARED_MEMORY

pytestmark = [*guard.MARKS, pytest.mark.timeout(1800)]

BIASES = [
    "t5",
    "alibi",
    "fox",
    "grape_a",
    "fire",
    "layered",
]  # by tables, lines, sums, slopes, laid out, and a window: the first to ask
FLEX = "triton_tem_fused_flex_attention"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return guard.build(tmp_path_factory.mktemp("guard") / "guard.so", "cuda")


def printed(script: str, *args: str, **environment: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(guard.HERE / script), *args]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert not done.returncode, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("capability", "width", "names"),
    [
        ("9.0", 64, [*BIASES, *(name for name in encodings.names() if name not in BIASES)]),
        ("9.0", 128, BIASES),
        ("8.0", 64, BIASES),
        ("8.6", 128, BIASES),
        ("12.0", 64, BIASES),
    ],
)
def test_what_a_run_compiles_fits_the_shared_memory_of_the_device(
    library: Path, capability: str, width: int, names: list[str]
) -> None:
    rows = printed("compiled.py", capability, str(width), *names, LD_PRELOAD=str(library))
    assert [row["encoding"] for row in rows] == names
    assert not [row for row in rows if row["warned"]]
    kernels = {row["encoding"]: dict(row["kernels"]) for row in rows}
    limit = SHARED_MEMORY[tuple(map(int, capability.split(".")))]
    assert max(size for made in kernels.values() for size in made.values()) <= limit
    for name in BIASES:
        assert any(kernel.startswith(FLEX) for kernel in kernels[name]), name


def test_what_is_compiled_computes_what_is_not(library: Path) -> None:
    rows = printed("values.py", LD_PRELOAD=str(library), TRITON_INTERPRET="1")
    assert len(rows) == 24
    launched = [row["launched"] for row in rows]
    assert all(later > sooner for sooner, later in zip([0, *launched], launched, strict=False))
    for row in rows:
        assert max(row["differences"]) < (1e-2 if "fp16" in row["case"] else 1e-5), row
    graphs = {row["case"]: row["graphs"] for row in rows}
    first, second, third = (graphs[f"evaluation of {length}"] for length in (256, 300, 513))
    assert first < second == third  # one graph for the first length, another for all others
