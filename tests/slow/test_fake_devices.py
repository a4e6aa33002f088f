"""Training and scoring on CUDA and MPS by fake tensors: every scheme steps, and the host hardly ever waits."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from fake import guard

from posbench import encodings

# MPS has no fp64: what a table there is made of goes to the host, and the table comes back. How many there are in four
# layers, where it is learned parameters, whose gradients go the same way, and where it is distances.
LEARNED = {
    "grape_m": 4, "lerope": 1, "selective_rope": 4, "carope": 4, "liere": 4, "comrope": 4, "spe": 8, "algebraic": 1,
    "repo": 3,
}  # fmt: skip
OF_DISTANCES = {"sandwich": 4}

pytestmark = guard.MARKS


@pytest.fixture(scope="module", params=["cuda", "mps"])
def asked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """The kind of device, and what each encoding asked of it."""
    library = guard.build(tmp_path_factory.mktemp("guard") / "guard.so", request.param)
    done = subprocess.run(
        [sys.executable, str(guard.HERE / "steps.py"), request.param],
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert not [row for row in rows if "fails" in row], done.stderr[-3000:]
    return request.param, {row["encoding"]: row for row in rows}


def test_every_scheme_steps_and_scores(asked: tuple[str, dict[str, Any]]) -> None:
    _, rows = asked
    assert list(rows) == encodings.names()
    assert all(row[what]["launches"] > 50 for row in rows.values() for what in ("step", "score"))


def test_the_host_reads_a_device_once_in_a_step_and_once_in_a_batch_that_is_scored(
    asked: tuple[str, dict[str, Any]],
) -> None:
    kind, rows = asked
    for name, row in rows.items():
        for what in ("step", "score"):
            # MPS has no fp64, and what is drawn there, the host has to fetch for its table.
            made = OF_DISTANCES.get(name, 0) + LEARNED.get(name, 0) * (2 if what == "step" else 1)
            drawn = name in ("randomized", "shape", "cape", "bipe")
            most = 1 + (made + drawn if kind == "mps" else 0)
            assert sum(row[what]["reads"].values()) == most, (name, what, row[what]["reads"])


def test_one_of_several_processes_on_cuda_waits_no_more_than_one_alone_and_sends_before_its_pass_ends(
    asked: tuple[str, dict[str, Any]],
) -> None:
    kind, rows = asked
    if kind == "mps":
        pytest.skip("one process only")
    told = rows["none"]["step of two processes"]
    assert sum(told["reads"].values()) == 1 and not told["blocking"] and told["early"] > 3, told


def test_no_copy_to_cuda_makes_the_host_wait_and_those_to_mps_are_the_batch_and_a_table(
    asked: tuple[str, dict[str, Any]],
) -> None:
    kind, rows = asked
    for name, row in rows.items():
        tables = (LEARNED | OF_DISTANCES | {"xpos": 2, "repo": 4}).get(name, 1)  # repo: of its plain layers, too
        for what, batch in (("step", 2), ("score", 1)):
            back = LEARNED.get(name, 0) if what == "step" else 0  # of gradients
            most = 0 if kind == "cuda" else batch + tables + back
            assert sum(row[what]["blocking"].values()) <= most, (name, what, row[what]["blocking"])


def test_fp64_never_reaches_mps_and_on_cuda_is_for_tables_of_positions_alone(
    asked: tuple[str, dict[str, Any]],
) -> None:
    kind, rows = asked
    for name, row in rows.items():
        for what in ("step", "score"):
            places = {place.split()[1].partition(":")[0] for place in row[what]["fp64"]}
            assert kind == "cuda" or not places, (name, what, places)
            places -= {"training/step.py"} if name in LEARNED else set()  # where their gradients are made
            tables = all(place == "machine.py" or place.startswith("encodings/") for place in places)  # sent, or made
            assert tables, (name, what, places)
