"""Several processes that train one run: they give what one gives, and what ends one of
them ends all.
"""

import functools
import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import changed, encoded, start_child, write_words
from torch.cuda._utils import _get_device_index

import posbench.training.train
from posbench.config.schema import Config
from posbench.errors import Stopped, UserError
from posbench.launch import run as launch
from posbench.launch.plans import Plan
from posbench.processes import Place, World, joined, place
from posbench.run import checkpoint
from posbench.run.rows import evaluation_rows, training_rows
from posbench.run.run import load_record
from posbench.terminal import exits
from posbench.training.step import Trainer
from posbench.training.train import train

STEPS = 12


@pytest.fixture(autouse=True)
def loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")


@pytest.fixture
def config(tiny_config, tmp_path):
    write_words(tmp_path)
    runtime = {
        "cache": str(tmp_path / "cache"),
        "validate_every_steps": 6,
        "checkpoint_every_steps": 5,
    }
    return changed(
        tiny_config,
        data={"path": str(tmp_path / "text.txt")},
        evaluation={"batch_tokens": 128},
        runtime=runtime,
    )


def together(size: int, folder: Path, work: Callable[[World], object]) -> None:
    """Do the same work in this process and in forks of it."""
    # a fork would wait for the threads of a process group that an earlier test's
    # traceback still holds
    gc.collect()
    store = f"file://{folder}.store-{time.monotonic_ns()}"

    def process(rank: int) -> None:
        with joined(Place(rank, size, rank, store) if size > 1 else None) as world:
            work(world)

    others = [start_child(functools.partial(process, rank)) for rank in range(1, size)]
    try:
        process(0)
    finally:
        codes = [os.waitpid(other, 0)[1] for other in others]
    assert not any(codes)


def trained(config: Config, folder: Path, size: int) -> None:
    together(size, folder, lambda world: train(config, folder, [], world=world))


def rows(folder: Path, *names: str) -> list[list[float]]:
    return [
        [row[name] for name in names]
        for row in training_rows(folder)
        if names[0] in row
    ]


def assert_alike(folder: Path, other: Path) -> None:
    """Compare losses and norms up to rounding, and the rows of evaluations of the same
    windows.
    """
    # AdamW begins with the signs of gradients: what rounds to another sign shows in
    # later norms, not in losses.
    for name, relative in (
        ("train/loss", 1e-6),
        ("val/loss", 1e-6),
        ("train/grad_norm", 1e-5),
    ):
        assert rows(other, name) == [
            pytest.approx(row, rel=relative, abs=1e-6) for row in rows(folder, name)
        ]
    assert len(rows(folder, "train/loss")) == STEPS
    for row, expected in zip(
        evaluation_rows(other), evaluation_rows(folder), strict=True
    ):
        assert row.nll == pytest.approx(expected.nll, abs=1e-6)
        assert row.status == "ok"
        for name in ("targets_sha256", "n_tokens", "accuracy", "exact_match"):
            assert getattr(row, name) == getattr(expected, name)
    assert rows(other, "val/accuracy") == rows(folder, "val/accuracy")


@pytest.mark.parametrize(
    ("size", "accumulation", "encoding"),
    [(2, 2, "randomized"), pytest.param(4, 1, "task", marks=pytest.mark.slow)],
)
def test_several_processes_give_what_one_gives(
    config, tmp_path, size, accumulation, encoding
):
    tokens = 16 * 8 * STEPS * accumulation
    updates = {"accumulation": accumulation, "tokens": tokens}
    config = changed(config, training=updates)
    if encoding == "task":
        encoding = "rope"
        task = {"name": "copy", "shortest": 2, "longest": 7, "vocabulary": 4}
        data = {"name": "problems", "source": "task", "path": None, "task": task}
        asked = {"protocols": ("problems",), "ratios": (1.0, 2.0), "blocks": 9}
        config = changed(config, data=data, evaluation=asked)
    config = encoded(config, encoding)
    train(config, tmp_path / "one", [])
    trained(config, tmp_path / "several", size)
    assert_alike(tmp_path / "one", tmp_path / "several")
    record = load_record(tmp_path / "several")
    assert record["status"] == "done"
    assert record["attempt"]["processes"] == size
    assert record["cpu_seconds"] > 0


def signal_at(step: int, patch: pytest.MonkeyPatch, rank: int) -> None:
    """Send SIGTERM to one process at an update."""
    plain = posbench.training.train.begin_update

    def update(trainer: Trainer, batch: Any, number: int, rate: float) -> Any:
        assert len(batch.ids) * trainer.world.size == trainer.training.batch_size, (
            "it reads the rows that it computes"
        )
        if (number, trainer.world.rank) == (step, rank):
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(trainer, batch, number, rate)

    patch.setattr(posbench.training.train, "begin_update", update)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "rank", "ahead"), [(3, 1, 0), (2, 1, 1)])
def test_a_signal_to_one_stops_all_after_the_same_update_and_the_run_goes_on_to_the_bit(
    config, tmp_path, monkeypatch, size, rank, ahead
):
    config = changed(
        config,
        training={"batch_size": 6, "tokens": 16 * 6 * STEPS},
        runtime={"log_every_steps": 4},
    )
    # as on GPUs, an update is read one later
    monkeypatch.setattr(posbench.training.train, "_AHEAD", {"cpu": ahead})
    trained(config, tmp_path / "whole", size)
    with (
        monkeypatch.context() as patch,
        pytest.raises(Stopped, match="SIGTERM after step 8; saved") as stopped,
    ):
        signal_at(7 - ahead, patch, rank)
        trained(config, tmp_path / "run", size)
    record = load_record(tmp_path / "run")
    assert stopped.value.exit_code == 143
    assert record["status"] == "stopped"
    assert record["reason"] == "signal"
    trained(config, tmp_path / "run", size)
    resumed, whole = (checkpoint.trained(tmp_path / name) for name in ("run", "whole"))
    assert resumed.step == whole.step == STEPS
    torch.testing.assert_close(resumed.weights(), whole.weights(), rtol=0, atol=0)


OOM, KILL = (
    "raise posbench.errors.RunFailed('no room', reason='oom')",
    "os.kill(os.getpid(), signal.SIGKILL)",
)


def act(event: str, *_: Any) -> None:
    """Stand in for training: the second rank executes `event`, and the first waits for
    a message, or sleeps.
    """
    waits = "world.from_first()" if event == KILL else "time.sleep(200)"
    exec(event if _[-1].rank == 1 else waits, {**globals(), "world": _[-1]})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "text", "code"),
    [
        (KILL, "rank 1 of 2 was killed by SIGKILL", 137),
        (OOM, "rank 1 of 2 failed: no room", 1),
    ],
)
def test_a_rank_that_fails_ends_the_others_and_is_named_in_one_line_with_its_exit_code(
    config, tmp_path, monkeypatch, capfd, event, text, code
):
    monkeypatch.setattr(launch.training, "train", functools.partial(act, event))
    # a busy machine ends processes slowly
    monkeypatch.setattr(launch, "_GRACE_SECONDS", 2.0)
    plan = Plan(changed(config, runtime={"processes": 2}), tmp_path / "run", ())
    began = time.monotonic()
    assert exits.run(lambda: launch.run(plan)) == code
    errors = [
        line
        for line in capfd.readouterr().err.splitlines()
        if line.startswith("error: ")
    ]
    assert errors == [f"error: {text}"]
    assert not multiprocessing.active_children()
    assert time.monotonic() - began < 150
    record = load_record(tmp_path / "run")
    assert record["status"] == "failed"
    assert record["message"] == text


def test_torchrun_and_srun_give_a_process_its_place(config, monkeypatch):
    assert place(4) is None
    slurm = {
        "PROCID": "3",
        "STEP_NUM_TASKS": "4",
        "LOCALID": "1",
        "STEP_NUM_NODES": "1",
        "JOB_ID": "7",
        "STEP_ID": "0",
    }
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert place(1) is None  # each task is a run of its own
    assert place(4) == (3, 4, 1, "tcp://127.0.0.1:20217")
    for name, value in {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert place(1) == (2, 4, 0, "env://")
    with pytest.raises(UserError, match=r"runtime.processes is 2, but 4 were started"):
        launch.train(Plan(changed(config, runtime={"processes": 2}), Path("run"), ()))


def test_each_process_has_a_device_of_its_own(monkeypatch):
    current: list[torch.device] = []
    monkeypatch.setattr(
        torch.cuda,
        "set_device",
        lambda given: current.append(given) or _get_device_index(given),
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for world, name in (
        (World(), "cuda"),
        (World(), "cuda:1"),
        (World(5, 8, 1), "cuda"),
    ):
        world.device(torch.device(name))
    assert current == [torch.device("cuda:1")] * 2
    assert World(0, 2).device(torch.device("cpu")).type == "cpu"
    with pytest.raises(
        UserError,
        match="device is mps: 2 processes run on cpu, or on cuda with a GPU each",
    ):
        World(0, 2).device(torch.device("mps"))
